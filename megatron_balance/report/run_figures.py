"""Computes the figures of a run, step by step and in total, for the charts and tables of the report.

Invariant: stock and plan are judged by the same cost model in each step, and measured times by the same formula.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError
from megatron_balance.planner import ScheduleMetrics
from megatron_balance.record.judging import costs_of_rows, imbalance, recosted, step_metrics, stock_step
from megatron_balance.record.run_record import RunInfo, RunRecord
from megatron_balance.record.step import StepRecord
from megatron_balance.report.time_scale import TimeScale, is_measured, time_scale
from megatron_balance.report.timeline import step_timeline


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
        stock: the same samples under Megatron's own sampler.
        planned: as the run planned them.
        beforehand: a plan made before the run, judged as the run's own; None without one.
        measured_imbalance: `[num_steps]`, NaN where a step was not measured.
        measured_seconds: `[num_steps]` of the busiest rank's micro-batches, likewise.
    """

    record: RunRecord
    scale: TimeScale
    stock: PolicyFigures
    planned: PolicyFigures
    beforehand: PolicyFigures | None
    measured_imbalance: NDArray[np.float64]
    measured_seconds: NDArray[np.float64]

    @property
    def info(self) -> RunInfo:
        """The properties that all steps share."""
        return self.record.info

    @property
    def is_measured(self) -> bool:
        """True if any step was measured."""
        return not bool(np.isnan(self.measured_imbalance).all())

    @cached_property
    def speed_up(self) -> float:
        """Predicted time under stock over predicted time as planned, of all steps."""
        planned = float(self.planned.times.sum())
        return float(self.stock.times.sum()) / planned if planned else 1.0

    @cached_property
    def shown_imbalance(self) -> NDArray[np.float64]:
        """`[num_steps]` measured imbalance of measured steps, else the planned one."""
        return np.where(np.isnan(self.measured_imbalance), self.planned.imbalance, self.measured_imbalance)

    @cached_property
    def iterations(self) -> NDArray[np.int64]:
        """`[num_steps]` Megatron's iteration numbers."""
        return np.array([step.iteration for step in self.record.steps], dtype=np.int64)


def run_figures(record: RunRecord, *, beforehand: RunRecord | None = None) -> RunFigures:
    """Compute the figures of a run, its stock baseline and an earlier plan.

    Args:
        record: the run. Steps without samples are left out.
        beforehand: a plan for the same number of data-parallel ranks; its step i is shown beside step i of the run.

    Raises:
        BalanceError: no step holds a sample.
    """
    kept = [index for index, step in enumerate(record.steps) if step.segment_lengths.size]
    if not kept:
        raise BalanceError("the run holds no step with samples: the first is written when it has run.")
    record = RunRecord(record.info, tuple(record.steps[index] for index in kept))
    if beforehand is not None:
        steps = tuple(beforehand.steps[index] for index in kept if index < len(beforehand.steps))
        beforehand = RunRecord(beforehand.info, steps)
    scale, info = time_scale(record), record.info
    stock = tuple(stock_step(step, info=info) for step in record.steps)
    earlier = None
    if beforehand is not None:
        earlier = tuple(
            recosted(plan, cost_model=step.cost_model, info=info)
            for plan, step in zip(beforehand.steps, record.steps, strict=False)
        )
    measured = [is_measured(step) for step in record.steps]
    return RunFigures(
        record=record,
        scale=scale,
        stock=_policy(stock, scale=scale),
        planned=_policy(record.steps, scale=scale),
        beforehand=None if earlier is None else _policy(earlier, scale=scale),
        measured_imbalance=np.array(
            [
                imbalance(step.seconds, info=info) if known else np.nan
                for step, known in zip(record.steps, measured, strict=True)
            ]
        ),
        measured_seconds=np.array([float(step.seconds.sum(axis=1).max()) for step in record.steps]),
    )


def _policy(steps: tuple[StepRecord, ...], *, scale: TimeScale) -> PolicyFigures:
    info = scale.info
    metrics = tuple(step_metrics(step, info=info) for step in steps)
    return PolicyFigures(
        steps=steps,
        metrics=metrics,
        imbalance=np.array([imbalance(costs_of_rows(step, info=info), info=info) for step in steps]),
        times=np.array([step_timeline(scale.times(step), info=info).total for step in steps]),
    )
