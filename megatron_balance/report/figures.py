"""Computes the figures of a run for the charts, tables and timelines of the report, and of a policy for `compare`.

Predicted costs become times by one factor for each run:

    costs are seconds                      shown as they are
    costs are tokens or FLOPs, measured    the median over steps of measured / predicted
    costs are tokens or FLOPs, planned     shown in tokens or FLOPs

Measurements are of one pipeline stage, so one stage is shown; costs in seconds are of the whole model, and are divided
by the stages. Within a step

    step        a rank's micro-batches follow one another; ranks wait at the end
    microbatch  a slot begins when every rank of the sync group has ended the slot before
    pipeline    as `step`, on one stage; the bubble is drawn together with the waiting at the end, because the planner
                computes makespans, not the times of single stages

Invariants: stock and plan are judged by the same cost model in each step, and measured times by the same formula;
micro-batches of a rank do not overlap and are in slot order; none ends after `total`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cost.calibration import UNITS_PER_SECOND
from megatron_balance.errors import BalanceError
from megatron_balance.planner import Forest, ScheduleMetrics, waiting
from megatron_balance.record import RunRecord, StepRecord
from megatron_balance.record.step import rank_slowdowns

Floats = NDArray[np.float64]

_UNITS = {"tokens": "tokens", "flops": "FLOP"}


class TimeScale(NamedTuple):
    """From costs to the unit of the time axis, on one pipeline stage; `fitted` to measured seconds, or not."""

    unit: str  # s, tokens or FLOP
    per_cost: float
    fitted: bool = False


def time_scale(record: RunRecord) -> TimeScale:
    """The scale of a record."""
    stages, in_seconds = record.info.topology.pp_size, record.info.cost_name == "seconds"
    if not (in_seconds and stages == 1):
        sums = [_unwaited(step).sum(axis=1) for step in record.steps if step.is_measured]
        ratios = [seconds / costs for costs, seconds in sums if costs]
        if ratios:
            return TimeScale("s", float(np.median(ratios)), fitted=True)
    unit = "s" if in_seconds else _UNITS.get(record.info.cost_name, "cost")
    return TimeScale(unit, (1 / UNITS_PER_SECOND if in_seconds else 1) / stages)


def _unwaited(step: StepRecord) -> Floats:
    """`[2, n]` costs and seconds of the micro-batches that waited for no other rank."""
    mask = step.is_slowest & (step.costs > 0)
    return np.stack([step.costs[mask], step.seconds[mask]])


@dataclass(frozen=True, eq=False)
class PolicyFigures:
    """All steps under one policy, as predicted or as measured.

    Attributes:
        steps: `[num_steps]` with the slots of this policy, and the costs that judge it.
        scale: from costs to time.
        width: DP×CP ranks that a rank is drawn as: above 1 for one size beside a plan with dynamic sizes.
        measured: times are those measured, NaN where a step was not.
    """

    steps: Sequence[StepRecord]
    scale: TimeScale
    width: int = 1
    measured: bool = False

    @cached_property
    def metrics(self) -> tuple[ScheduleMetrics, ...]:
        """`[num_steps]` judged by each step's cost model."""
        return tuple(step.metrics() for step in self.steps)

    def mean(self, name: str) -> float:
        """A figure of the metrics, mean over the steps."""
        return float(np.mean([getattr(step, name) for step in self.metrics]))

    @property
    def least_headroom(self) -> float:
        """Room below the token cap in the fullest micro-batch, as a fraction of the cap."""
        return min(step.cap_headroom or 0.0 for step in self.metrics)

    @cached_property
    def imbalance(self) -> Floats:
        """`[num_steps]` slowest over mean, by the objective."""
        return np.array([step.imbalance(step.seconds if self.measured else step.costs) for step in self.steps])

    @cached_property
    def times(self) -> Floats:
        """`[num_steps]` times of the steps."""
        if self.measured:
            return np.array([step.seconds.sum(axis=1).max() for step in self.steps])
        per_cost = self.scale.per_cost / self.width * self.steps[0].topology.gpus_per_rank
        return np.array([step.predicted_cost * per_cost for step in self.metrics])

    @property
    def sharing(self) -> Sharing | None:
        """What is computed once, of all steps; None where no step shares."""
        steps = [sharing_of(step, step.forest) for step in self.steps if step.forest is not None]
        return Sharing(*map(sum, zip(*steps, strict=True))) if steps else None

    def times_if_dearer(self, factor: int) -> Floats:
        """`times` where a pair of attention costs so many times as much in micro-batches that share tokens."""
        times = self.times.copy()
        for index, step in enumerate(self.steps):
            model = replace(step.cost_model, stages=None)
            terms = {
                name: value * (factor if name == "quadratic" or isinstance(name, int) else 1)
                for name, value in model.terms().items()
            }
            usual, dearer = (replace(step, cost_model=model).costs for model in (model, model.with_terms(terms)))
            alone = np.bincount(step.microbatch_of, step.padded_lengths, usual.size)
            shares = (step.microbatch_tokens() < alone).reshape(usual.shape)
            slowest = [step.imbalance(grid) * grid.sum() for grid in (np.where(shares, dearer, usual), usual)]
            times[index] *= slowest[0] / slowest[1] if slowest[1] else 1.0
        return times

    def timeline(self, index: int) -> Timeline:
        """One step."""
        step, width = self.steps[index], self.width
        durations = step.seconds if self.measured else step.costs * (self.scale.per_cost / width)
        sync_size = waiting(step.objective, topology=step.topology).sync_size
        slowest = durations.reshape(-1, sync_size, step.num_microbatches).max(axis=1)
        ends = np.cumsum(slowest, axis=1)
        return Timeline(
            starts=np.repeat(ends - slowest, sync_size * width, axis=0),
            durations=np.repeat(durations, width, axis=0),
            total=max(0.0 if self.measured else float(self.times[index]), float(ends[:, -1].max())),
            samples=[slots for slots in step.samples() for _ in range(width)],
            sizes=np.repeat(step.cp_size_grid, width, axis=0),
        )


class Sharing(NamedTuple):
    """Tokens without padding, and trees: samples that begin alike."""

    given: int
    computed: int
    least: int  # of a plan that computes every token once
    trees: int
    cut: int  # that several micro-batches compute in part, so that they repeat what is shared
    unshared: int  # that no micro-batch has two samples of

    def __str__(self) -> str:
        part, least = self.computed / max(self.given, 1), self.least / max(self.given, 1)
        return (
            f"{self.computed:,} of {self.given:,} tokens are computed ({part:.1%}; each once: {least:.1%}); trees: "
            f"{self.trees:,}, of which {self.cut:,} are cut over micro-batches and {self.unshared:,} not shared"
        )


def sharing_of(step: StepRecord, forest: Forest) -> Sharing:
    """What the micro-batches of a step share."""
    starts, roots = forest.starts(step.microbatch_of), forest.paths[0]
    ends = np.append(forest.ends, 0)
    added = forest.lengths - ends[starts]
    given, computed = (np.bincount(roots, tokens) for tokens in (forest.lengths, added))
    least = given - np.bincount(roots[forest.order], ends[forest.branches])
    is_cut, is_alone = (least < computed) & (computed < given), (least < given) & (computed == given)
    numbers = (given.sum(), computed.sum(), least.sum(), (least < given).sum(), is_cut.sum(), is_alone.sum())
    return Sharing(*map(int, numbers))


class Timeline(NamedTuple):
    """When each micro-batch of one step begins and how long it lasts, `[num_ranks, num_microbatches]` as drawn."""

    starts: Floats  # in the unit of the time scale, as durations are
    durations: Floats
    total: float  # end of the step, until which ranks wait
    samples: list[list[tuple[int, ...]]]  # [rank][slot] ids
    sizes: NDArray[np.int64]  # context-parallel; 0 where a DP×CP rank has no such slot


@dataclass(frozen=True, eq=False)
class RunFigures:
    """A run, and the policies it is compared with.

    Attributes:
        record: the run; each of its steps holds a sample.
        policies: `stock`, the same samples under Megatron's own sampler; `planned`, as the run planned them;
            `measured`, where any step was.
    """

    record: RunRecord
    policies: Mapping[str, PolicyFigures]

    @property
    def planned(self) -> PolicyFigures:
        """As the run planned it."""
        return self.policies["planned"]

    @cached_property
    def predictions(self) -> Floats:
        """`[2, n]` predicted and measured seconds of micro-batches that waited for no other rank."""
        pairs = [_unwaited(step) for step in self.record.steps if step.is_measured]
        return np.concatenate([np.zeros((2, 0)), *pairs], axis=1) * [[self.planned.scale.per_cost], [1]]

    @cached_property
    def slowdowns(self) -> Floats:
        """`[num_ranks]` of `rank_slowdowns`; NaN where ranks wait for one another in micro-batches."""
        info, steps = self.record.info, self.record.steps
        if info.topology.dynamic_cp or waiting(info.objective, topology=info.topology).sync_size > 1:
            return np.full(len(steps[0].costs), np.nan)
        sums = np.array([(step.costs.sum(axis=1), step.seconds.sum(axis=1)) for step in steps if step.is_measured])
        return rank_slowdowns(sums[:, 0], seconds=sums[:, 1]) if sums.size else np.full(len(steps[0].costs), np.nan)

    @cached_property
    def model_flops(self) -> Floats:
        """`[num_steps]` of training on a step's samples; NaN where the record's costs are not of FLOPs."""
        info, steps, rate = self.record.info, self.record.steps, self.record.info.environment.get("attention_rate")
        if info.cost_name != "flops" or not isinstance(rate, int | float):
            return np.full(len(steps), np.nan)
        # Attention is weighed by its rate, and routed experts may be apart.
        per_token = (1 - rate) * info.cost_model.linear + info.cost_model.expert_linear
        costs = [rate * float(info.cost_model.local_cost(step.segments).sum()) for step in steps]
        return np.array(costs) + per_token * np.array([step.lengths.sum() for step in steps], dtype=float)

    def mfu(self, policy: PolicyFigures, *, peak: float) -> float:
        """Model FLOPs over those of all GPUs at `peak` TFLOP/s in a policy's forward and backward passes; else NaN."""
        if policy.scale.unit != "s":
            return np.nan
        is_known, num_gpus = ~np.isnan(policy.times), self.record.info.topology.num_gpus
        return float(self.model_flops[is_known].sum() / (policy.times[is_known].sum() * num_gpus * peak * 1e12))

    @property
    def median_error(self) -> float:
        """Median relative error of the predictions."""
        predicted, measured = self.predictions
        return float(np.median(np.abs(predicted / measured - 1)))


def run_figures(record: RunRecord) -> RunFigures:
    """Compute the figures of a run and of its stock baseline; steps without samples are left out."""
    steps = tuple(step for step in record.steps if step.lengths.size)
    if not steps:
        raise BalanceError("the record has no step with samples yet: let the run finish its first step.")
    record, topology = record._replace(steps=steps), record.info.topology
    scale, width = time_scale(record), topology.cp_size if topology.dynamic_cp else 1
    policies = {
        "stock": PolicyFigures([step.stock() for step in steps], scale, width),
        "planned": PolicyFigures(steps, scale),
    }
    if any(step.is_measured for step in steps):
        policies["measured"] = PolicyFigures(steps, TimeScale("s", 1), measured=True)
    return RunFigures(record, policies)
