"""Converts predicted costs to the time axis: seconds where they are known, else the cost's own unit.

    costs are seconds                      predicted seconds are shown as they are
    costs are tokens or FLOPs, measured    scaled by one number, the median over steps of measured / predicted
    costs are tokens or FLOPs, planned     shown in tokens or FLOPs

Measurements are of one pipeline stage, so one stage is shown; costs in seconds are of the whole model, and are
scaled to a stage. Where ranks wait for one another inside a micro-batch, only the slowest rank's time is its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cost.calibration import UNITS_PER_SECOND
from megatron_balance.planner import sync_group_size
from megatron_balance.record.judging import costs_of_rows
from megatron_balance.record.run_record import RunInfo, RunRecord
from megatron_balance.record.step import StepRecord

_UNITS = {"tokens": "tokens", "flops": "FLOP"}


@dataclass(frozen=True)
class TimeScale:
    """Factors from costs to the unit of the time axis, on one pipeline stage.

    Attributes:
        unit: `s`, `tokens` or `FLOP`.
        per_cost: units per unit of the run's cost model.
        fitted: `per_cost` was fitted to measured seconds.
        info: of the run.
    """

    unit: str
    per_cost: float
    fitted: bool
    info: RunInfo

    def times(self, step: StepRecord) -> NDArray[np.float64]:
        """`[num_rows, num_microbatches]` predicted times of a step's micro-batches; rows as for `costs_of_rows`."""
        return costs_of_rows(step, info=self.info) * self.of_cost(step)

    def of_cost(self, step: StepRecord) -> float:
        """Units of one count of the step's cost grid."""
        return float(2**step.cost_shift) * self.per_cost


def is_measured(step: StepRecord) -> bool:
    """True if the micro-batches of every rank were measured."""
    return not np.isnan(step.seconds).any()


def time_scale(record: RunRecord) -> TimeScale:
    """The scale of a record."""
    info = record.info
    stages = info.topology.pp_size
    in_seconds = info.cost_name == "seconds"
    fitted = None
    if not in_seconds or stages > 1:
        fitted = _fitted([step for step in record.steps if is_measured(step)], info=info)
    return TimeScale(
        unit="s" if in_seconds or fitted is not None else _UNITS.get(info.cost_name, "cost"),
        per_cost=fitted if fitted is not None else (1 / UNITS_PER_SECOND if in_seconds else 1) / stages,
        fitted=fitted is not None,
        info=info,
    )


def is_slowest(step: StepRecord, *, info: RunInfo) -> NDArray[np.bool_]:
    """`[dp_size, num_microbatches]` True where the rank is the costliest of those that meet, and was measured.

    Its seconds contain no waiting; those of the other ranks do.
    """
    groups = step.cost_grid.reshape(-1, sync_group_size(info.objective, topology=info.topology), step.num_microbatches)
    own = (groups == groups.max(axis=1, keepdims=True)).reshape(step.cost_grid.shape)
    return own & (step.seconds > 0)


def _fitted(steps: list[StepRecord], *, info: RunInfo) -> float | None:
    """The median step's measured seconds per unit of cost; None without measurements."""
    ratios: list[float] = []
    for step in steps:
        chosen = is_slowest(step, info=info)
        costs = float(step.cost_grid[chosen].sum()) * 2.0**step.cost_shift
        if costs:
            ratios.append(float(step.seconds[chosen].sum()) / costs)
    return float(np.median(ratios)) if ratios else None
