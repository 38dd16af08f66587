"""The planner: lengths in, the rank and the micro-batch of every sample out.

`build.py` tells the steps, `level_packing.py` how a plan is made. Other rooms and the tests use the names below;
everything else may change in any release.
"""

from __future__ import annotations

from megatron_balance.planner.batch import SizedBatch, batch_of
from megatron_balance.planner.build import balance, build_data_schedule
from megatron_balance.planner.forest import Forest
from megatron_balance.planner.level_packing import Batch
from megatron_balance.planner.metrics import ScheduleMetrics, slowest_over_mean, unavoidable_waiting
from megatron_balance.planner.objective import (
    OBJECTIVES,
    Pipeline,
    is_makespan,
    makespans,
    organ_pipe_order,
    resolve_objective,
    waiting,
)
from megatron_balance.planner.partition import karmarkar_karp, partition_items
from megatron_balance.planner.problem import Problem, as_integers, number_groups
from megatron_balance.planner.schedule import Assignment, DataSchedule

__all__ = [
    "Assignment",
    "Batch",
    "DataSchedule",
    "Forest",
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
