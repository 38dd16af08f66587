"""The planner: lengths in, the rank and the micro-batch of every sample out. `build.py` tells the steps.

The names below are what other rooms and the tests use; everything else in this room may change in any release.
"""

from __future__ import annotations

from megatron_balance.planner.build import build_data_schedule
from megatron_balance.planner.filling import fill_dummies
from megatron_balance.planner.metrics import (
    ScheduleMetrics,
    assignment_metrics,
    schedule_metrics,
    slowest_over_mean,
    sync_group_size,
)
from megatron_balance.planner.partition import karmarkar_karp
from megatron_balance.planner.rank_lists import RankLists, plan_rank_lists
from megatron_balance.planner.schedule import DataSchedule
from megatron_balance.planner.selection.bucketing import bucketed_order
from megatron_balance.planner.selection.rollout import split_rollout
from megatron_balance.planner.throughput import (
    num_gpus,
    rate_of_calibration,
    rate_of_flops,
    rate_of_run,
    rate_of_tokens,
    step_seconds,
)

__all__ = [
    "DataSchedule",
    "RankLists",
    "ScheduleMetrics",
    "assignment_metrics",
    "bucketed_order",
    "build_data_schedule",
    "fill_dummies",
    "karmarkar_karp",
    "num_gpus",
    "plan_rank_lists",
    "rate_of_calibration",
    "rate_of_flops",
    "rate_of_run",
    "rate_of_tokens",
    "schedule_metrics",
    "slowest_over_mean",
    "split_rollout",
    "step_seconds",
    "sync_group_size",
]
