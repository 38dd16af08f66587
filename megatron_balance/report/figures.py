"""Computes the figures of a run for the charts, tables and timelines of the report, and for `compare`.

Predicted costs become times by one factor for each run:

    costs are seconds                      shown as they are
    costs are tokens or FLOPs, measured    the median over steps of measured / predicted
    costs are tokens or FLOPs, planned     shown in tokens or FLOPs

Measurements are of one pipeline stage, so one stage is shown; costs in seconds are of the whole model, and are divided
by the stages. Within a step

    step        a rank's micro-batches follow one another; ranks wait at the end
    microbatch  a slot begins when every rank that meets there has ended the one before
    pipeline    as `step`, on one stage; the bubble is drawn together with the waiting at the end, because the planner
                computes makespans, not the times of single stages

Invariants: stock and plan are judged by the same cost model in each step, and measured times by the same formula;
micro-batches of a rank do not overlap and are in slot order; none ends after `total`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cost.calibration import UNITS_PER_SECOND
from megatron_balance.errors import BalanceError
from megatron_balance.planner import ScheduleMetrics, is_makespan, pipeline_makespans, waiting
from megatron_balance.record import RunInfo, RunRecord, StepRecord
from megatron_balance.record.judging import (
    costs_of_rows,
    imbalance,
    is_measured,
    is_slowest,
    step_metrics,
    stock_step,
)

_UNITS = {"tokens": "tokens", "flops": "FLOP"}
_WHOLE = 2**40
"""Resolution of integer times: the longest row divided by this."""


@dataclass(frozen=True)
class TimeScale:
    """The factor from costs to the unit of the time axis, on one pipeline stage.

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
        return costs_of_rows(step, info=self.info) * (float(2**step.cost_shift) * self.per_cost)


def time_scale(record: RunRecord) -> TimeScale:
    """The scale of a record."""
    info, stages = record.info, record.info.topology.pp_size
    in_seconds = info.cost_name == "seconds"
    ratios: list[float] = []
    for step in record.steps:
        if (in_seconds and stages == 1) or not is_measured(step):
            continue
        chosen = is_slowest(step, info=info)
        costs = float(step.cost_grid[chosen].sum()) * 2.0**step.cost_shift
        if costs:
            ratios.append(float(step.seconds[chosen].sum()) / costs)
    if ratios:
        return TimeScale("s", float(np.median(ratios)), fitted=True, info=info)
    unit = "s" if in_seconds else _UNITS.get(info.cost_name, "cost")
    return TimeScale(unit, (1 / UNITS_PER_SECOND if in_seconds else 1) / stages, fitted=False, info=info)


@dataclass(frozen=True, eq=False)
class Timeline:
    """When each micro-batch of one step begins and how long it lasts.

    Attributes:
        starts: `[num_rows, num_microbatches]`, in the unit of the durations.
        durations: `[num_rows, num_microbatches]`.
        total: end of the step, until which ranks wait.
    """

    starts: NDArray[np.float64]
    durations: NDArray[np.float64]
    total: float

    @property
    def idle_fraction(self) -> float:
        """Waiting time as a fraction of all ranks' time."""
        all_time = self.total * len(self.durations)
        return 1 - float(self.durations.sum()) / all_time if all_time else 0.0


def step_timeline(durations: NDArray[np.float64], *, info: RunInfo, with_bubble: bool = True) -> Timeline:
    """Place a step's micro-batches in time.

    Args:
        durations: `[num_rows, num_microbatches]` of one pipeline stage.
        info: objective and topology, which say where ranks wait.
        with_bubble: add the pipeline's bubble; measured times do not contain it.
    """
    topology, num_slots = info.topology, durations.shape[1]
    span = waiting(info.objective, topology=topology).span
    slowest = durations.reshape(-1, span, num_slots).max(axis=1)
    ends = np.cumsum(slowest, axis=1)
    total = longest = float(ends[:, -1].max())
    if with_bubble and total and topology.pp_size > 1 and is_makespan(info.objective, topology=topology):
        # The cost of a micro-batch over all stages is its cost on one stage times their number.
        costs = np.rint(slowest / longest * _WHOLE).astype(np.int64) * topology.pp_size
        makespans = pipeline_makespans(costs, pp_size=topology.pp_size, vpp_size=topology.vpp_size)
        total = max(total, float(makespans.max()) / _WHOLE * longest)
    return Timeline(np.repeat(ends - slowest, span, axis=0), durations, total)


@dataclass(frozen=True, eq=False)
class PolicyFigures:
    """One policy over all steps.

    Attributes:
        steps: `[num_steps]` with the slots of this policy.
        metrics: `[num_steps]` judged by each step's cost model.
        imbalance: `[num_steps]` slowest over mean, by the objective.
        times: `[num_steps]` predicted step times, in the unit of the time scale.
    """

    steps: tuple[StepRecord, ...]
    metrics: tuple[ScheduleMetrics, ...]
    imbalance: NDArray[np.float64]
    times: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class RunFigures:
    """A run, and the policies it is compared with.

    Attributes:
        record: the run, its costs in one unit.
        scale: from costs to time.
        policies: `stock`, the same samples under Megatron's own sampler; `planned`, as the run planned them.
        measured_imbalance: `[num_steps]`, NaN where a step was not measured.
        measured_seconds: `[num_steps]` of the busiest rank's micro-batches, likewise.
    """

    record: RunRecord
    scale: TimeScale
    policies: Mapping[str, PolicyFigures]
    measured_imbalance: NDArray[np.float64]
    measured_seconds: NDArray[np.float64]

    @property
    def info(self) -> RunInfo:
        """The properties that all steps share."""
        return self.record.info

    @property
    def num_rows(self) -> int:
        """Ranks of a timeline; leaves where context-parallel sizes differ."""
        topology = self.info.topology
        return topology.num_leaves if topology.dynamic_cp else topology.dp_size

    @property
    def is_measured(self) -> bool:
        """True if any step was measured."""
        return not bool(np.isnan(self.measured_imbalance).all())

    @cached_property
    def iterations(self) -> NDArray[np.int64]:
        """`[num_steps]` Megatron's iteration numbers."""
        return np.array([step.iteration for step in self.record.steps], dtype=np.int64)


def run_figures(record: RunRecord) -> RunFigures:
    """Compute the figures of a run and of its stock baseline.

    Args:
        record: the run. Steps without samples are left out.

    Raises:
        BalanceError: no step holds a sample.
    """
    kept = tuple(step for step in record.steps if step.segment_lengths.size)
    if not kept:
        raise BalanceError("the run holds no step with samples: the first is written when it has run.")
    record = RunRecord(record.info, kept)
    scale, info = time_scale(record), record.info
    seconds = [step.seconds for step in kept]
    return RunFigures(
        record=record,
        scale=scale,
        policies={
            "stock": _policy(tuple(stock_step(step, info=info) for step in kept), scale=scale),
            "planned": _policy(kept, scale=scale),
        },
        measured_imbalance=np.array([np.nan if np.isnan(one).any() else imbalance(one, info=info) for one in seconds]),
        measured_seconds=np.array([float(one.sum(axis=1).max()) for one in seconds]),
    )


def _policy(steps: tuple[StepRecord, ...], *, scale: TimeScale) -> PolicyFigures:
    info = scale.info
    return PolicyFigures(
        steps=steps,
        metrics=tuple(step_metrics(step, info=info) for step in steps),
        imbalance=np.array([imbalance(costs_of_rows(step, info=info), info=info) for step in steps]),
        times=np.array([step_timeline(scale.times(step), info=info).total for step in steps]),
    )
