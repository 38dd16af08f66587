"""Figures of a plan: imbalance, padding, room under the cap, samples moved, context-parallel sizes.

A plan may be judged by another cost model than it was made with (a plan by tokens judged by FLOPs), and an
assignment that is no schedule at all, such as the stock order, can be judged beside it.
"""

from __future__ import annotations

from megatron_balance.planner.metrics.assignments import assignment_metrics, schedule_metrics
from megatron_balance.planner.metrics.figures import ScheduleMetrics, slowest_over_mean, sync_group_size
from megatron_balance.planner.metrics.groups import group_metrics

__all__ = [
    "ScheduleMetrics",
    "assignment_metrics",
    "group_metrics",
    "schedule_metrics",
    "slowest_over_mean",
    "sync_group_size",
]
