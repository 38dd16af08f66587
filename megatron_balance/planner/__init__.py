"""The planner: lengths in, the rank and the micro-batch of every sample out. `build.py` tells the steps, `plan.py` how.

The names below are what other rooms and the tests use; everything else in this room may change in any release.
"""

from __future__ import annotations

from megatron_balance.planner.batch import Batch
from megatron_balance.planner.build import ALGORITHMS, balance, build_data_schedule
from megatron_balance.planner.dynamic_cp import SizedBatch
from megatron_balance.planner.fixed_ranks import karmarkar_karp, partition_items
from megatron_balance.planner.inputs import Images, Problem, as_integers, number_groups
from megatron_balance.planner.metrics import (
    ScheduleMetrics,
    plan_metrics,
    schedule_metrics,
    slowest_over_mean,
)
from megatron_balance.planner.schedule import DataSchedule, Ranks, batch_of
from megatron_balance.planner.times import (
    OBJECTIVES,
    is_makespan,
    mountain_order,
    pipeline_makespans,
    resolve_objective,
    waiting,
)

__all__ = [
    "ALGORITHMS",
    "Batch",
    "DataSchedule",
    "Images",
    "OBJECTIVES",
    "Problem",
    "Ranks",
    "ScheduleMetrics",
    "SizedBatch",
    "as_integers",
    "balance",
    "batch_of",
    "build_data_schedule",
    "is_makespan",
    "karmarkar_karp",
    "mountain_order",
    "number_groups",
    "partition_items",
    "pipeline_makespans",
    "plan_metrics",
    "resolve_objective",
    "schedule_metrics",
    "slowest_over_mean",
    "waiting",
]
