"""Converts predicted costs to the time axis: seconds where they are known, else the cost's own unit.

    costs are seconds (a calibration)      predicted seconds are shown as they are
    costs are tokens or FLOPs, measured    scaled by one number, the median over steps of measured / predicted
    costs are tokens or FLOPs, planned     shown in tokens or FLOPs

Measurements are of one pipeline stage, so one stage is shown; a calibration is of the whole model, and is
scaled to a stage. Where ranks wait for one another inside a micro-batch, only the slowest rank's time is its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cost.calibration import UNITS_PER_SECOND
from megatron_balance.planner.metrics import sync_group_size
from megatron_balance.record.judging import costs_of_rows, recosted
from megatron_balance.record.run_record import RunInfo, RunRecord
from megatron_balance.record.step import StepRecord

_UNITS = {"tokens": "tokens", "flops": "FLOP"}


@dataclass(frozen=True)
class TimeScale:
    """Factors from costs to the unit of the time axis, on one pipeline stage.

    Attributes:
        unit: `s`, `tokens` or `FLOP`.
        per_cost: units per unit of the run's first cost model.
        per_learned_cost: units per unit of a cost model that was learned in training, which counts attoseconds.
        fitted: `per_cost` was fitted to measured seconds.
        info: of the run, with its first cost model.
    """

    unit: str
    per_cost: float
    per_learned_cost: float
    fitted: bool
    info: RunInfo

    def times(self, step: StepRecord) -> NDArray[np.float64]:
        """`[num_rows, num_microbatches]` predicted times of a step's micro-batches; rows as for `costs_of_rows`."""
        return costs_of_rows(step, info=self.info) * self.of_cost(step)

    def of_cost(self, step: StepRecord) -> float:
        """Units of one count of the step's cost grid."""
        scale = self.per_learned_cost if is_learned(step, info=self.info) else self.per_cost
        return float(2**step.cost_shift) * scale


def is_learned(step: StepRecord, *, info: RunInfo) -> bool:
    """True if calibration in training has changed the cost model before this step."""
    return step.cost_model != info.cost_model


def is_measured(step: StepRecord) -> bool:
    """True if the micro-batches of every rank were measured."""
    return not np.isnan(step.seconds).any()


def in_one_unit(record: RunRecord) -> RunRecord:
    """The record; without any measured step, all costs are recomputed with the first cost model."""
    if any(is_measured(step) for step in record.steps):
        return record
    info = record.info
    return RunRecord(info, tuple(recosted(step, cost_model=info.cost_model, info=info) for step in record.steps))


def time_scale(record: RunRecord) -> TimeScale:
    """The scale of a record that is `in_one_unit`."""
    info = record.info
    stages = info.topology.pp_size
    in_seconds = info.cost_name == "seconds"
    exact = 1 / UNITS_PER_SECOND / stages
    first, learned = (
        _fitted(
            [step for step in record.steps if is_measured(step) and is_learned(step, info=info) == wanted], info=info
        )
        for wanted in (False, True)
    )
    if in_seconds and stages == 1:
        first = None
    elif first is None and learned is not None:
        # Calibration had a fit before the first measured step: its seconds are used for the steps before as well.
        step = next(step for step in record.steps if is_learned(step, info=info))
        before = recosted(step, cost_model=info.cost_model, info=info)
        ratio = (float(step.cost_grid.sum()) * 2.0**step.cost_shift) / (
            float(before.cost_grid.sum()) * 2.0**before.cost_shift
        )
        first = learned * ratio
    shown_in_seconds = in_seconds or first is not None
    return TimeScale(
        unit="s" if shown_in_seconds else _UNITS.get(info.cost_name, "cost"),
        per_cost=first if first is not None else exact if in_seconds else 1 / stages,
        per_learned_cost=learned if learned is not None and stages > 1 else 1 / UNITS_PER_SECOND,
        fitted=first is not None,
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
