"""The planner: lengths in, the rank and the micro-batch of every sample out. `build.py` tells the steps, `plan.py` how.

Other rooms and the tests use the names below; everything else may change in any release.
"""

from __future__ import annotations

from megatron_balance.planner.batch import Batch
from megatron_balance.planner.build import balance, build_data_schedule
from megatron_balance.planner.dynamic_cp import SizedBatch
from megatron_balance.planner.fixed_ranks import karmarkar_karp, partition_items
from megatron_balance.planner.inputs import Images, Problem, as_integers, number_groups
from megatron_balance.planner.metrics import ScheduleMetrics, batch_of, slowest_over_mean, unavoidable_waiting
from megatron_balance.planner.pipeline import Pipeline, makespans
from megatron_balance.planner.schedule import Assignment, DataSchedule
from megatron_balance.planner.times import (
    OBJECTIVES,
    is_makespan,
    organ_pipe_order,
    resolve_objective,
    waiting,
)

__all__ = [
    "Assignment",
    "Batch",
    "DataSchedule",
    "Images",
    "OBJECTIVES",
    "Problem",
    "ScheduleMetrics",
    "SizedBatch",
    "as_integers",
    "balance",
    "batch_of",
    "build_data_schedule",
    "is_makespan",
    "makespans",
    "karmarkar_karp",
    "organ_pipe_order",
    "number_groups",
    "partition_items",
    "Pipeline",
    "resolve_objective",
    "slowest_over_mean",
    "unavoidable_waiting",
    "waiting",
]
