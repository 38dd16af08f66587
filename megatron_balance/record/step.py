"""One step of a run: its samples, plan and measured seconds, judged by any cost model, and as stock would run it.

Invariant: steps that are compared hold the same samples, and are judged by the same cost model.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.planner import Assignment, DataSchedule, Problem, batch_of, slowest_over_mean, waiting

UNMEASURED = np.zeros((0, 0))


@dataclass(frozen=True, eq=False, kw_only=True)
class StepRecord(Assignment):
    """One step: its samples, where they ran (Assignment), and how long that took.

    Samples need not lie as in a valid schedule (stock).

    Attributes:
        iteration: Megatron's count of it, from 1.
        seconds: `[num_ranks, num_microbatches]` measured, forward and backward; NaN where it was not, 0 where a DP×CP
            rank has no such slot.
        plan_seconds, exchange_seconds, exposed_seconds: spent planning, moving, and waiting for both.
        rows: `[num_samples]` the row of the data set that each sample lay in, ascending from 0; None where rows are not
            known: each in its own, as it is.
        row_tokens: tokens that stock fills known rows up to; None where it runs them as they are.
    """

    iteration: int
    seconds: NDArray[np.float64] = field(default_factory=lambda: UNMEASURED)
    plan_seconds: float = 0.0
    exchange_seconds: float = 0.0
    exposed_seconds: float = 0.0
    rows: NDArray[np.int64] | None = None
    row_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.seconds is UNMEASURED:
            object.__setattr__(self, "seconds", np.where(self.cp_size_grid > 0, np.nan, 0.0))

    @classmethod
    def from_schedule(cls, schedule: DataSchedule, *, iteration: int, **attributes: Any) -> StepRecord:
        """A step as it was planned, not measured yet, with other `attributes` that are known."""
        names = (attribute.name for attribute in fields(Assignment))
        return cls(**{name: getattr(schedule, name) for name in names}, iteration=iteration, **attributes)

    @cached_property
    def costs(self) -> NDArray[np.float64]:
        """`[num_ranks, num_microbatches]` costs of micro-batches in units of the cost model, over a rank's GPUs."""
        batch = batch_of(self)
        return batch.cost_grid(self.microbatch_of, self.cp_size_grid).astype(np.float64) * 2.0**batch.shift

    @property
    def is_measured(self) -> bool:
        """True if the micro-batches of every rank were measured."""
        return not np.isnan(self.seconds).any()

    @property
    def is_slowest(self) -> NDArray[np.bool_]:
        """`[num_ranks, num_microbatches]` True where the rank is the costliest of those that meet, and was measured.

        Its seconds contain no waiting; those of the other ranks do.
        """
        groups = self.costs.reshape(
            -1, waiting(self.objective, topology=self.topology).sync_size, self.num_microbatches
        )
        is_largest = (groups == groups.max(axis=1, keepdims=True)).reshape(self.costs.shape)
        return is_largest & (self.seconds > 0)

    def imbalance(self, grid: NDArray[np.float64]) -> float:
        """`slowest_over_mean` of costs or measured seconds, by the objective of the step."""
        return slowest_over_mean(grid, objective=self.objective, topology=self.topology)

    def stock(self) -> StepRecord:
        """The same data under Megatron's own sampler: every rank runs the rows that it loaded, in that order.

        A micro-batch holds `micro_batch_size` rows where that is the limit, else one. What fills a row up to
        `row_tokens` is computed as part of its last sequence, and counted as padding. All have the context-parallel
        size of the run: also where the run has dynamic sizes, ranks are data-parallel ranks, with the costs of
        `cp_size` DP×CP ranks together.
        """
        topology, dp_size, per_slot = self.topology, self.topology.dp_size, self.limits.micro_batch_size or 1
        if self.forest is not None:
            return replace(self, forest=None).stock()
        if self.rows is not None:
            return self._in_rows(self.rows).stock()
        homes = round_robin(self.lengths.size, dp_size=dp_size) if self.home_ranks is None else self.home_ranks
        order, counts = np.argsort(homes, kind="stable"), np.bincount(homes, minlength=dp_size)
        position = np.empty_like(homes)
        position[order] = np.arange(homes.size) - np.repeat(np.cumsum(counts) - counts, counts)
        num_microbatches = max(int(-(-counts.max() // per_slot)), 1)
        return replace(
            self,
            topology=topology.with_cp_size(topology.cp_size),
            cost_model=self.cost_model.summed_over_cp(topology.cp_size) if topology.dynamic_cp else self.cost_model,
            microbatch_of=homes * num_microbatches + position // per_slot,
            home_ranks=homes,
            cp_size_grid=np.full((dp_size, num_microbatches), topology.cp_size, dtype=np.int64),
            seconds=UNMEASURED,
            plan_seconds=0.0,
            exchange_seconds=0.0,
            exposed_seconds=0.0,
        )

    def _in_rows(self, rows: NDArray[np.int64]) -> StepRecord:
        """The step whose samples are its rows as stock runs them; not planned."""
        num_rows = int(rows.max(initial=-1)) + 1
        segments = np.ones_like(rows) if self.num_segments is None else self.num_segments
        counts = np.bincount(rows, segments, num_rows).astype(np.int64)
        padded, topology = self.segments, self.topology
        if self.row_tokens is not None:
            # Rows are split among sequence-parallel ranks as a whole, and among context-parallel ones by sequence.
            topology, has_any = replace(topology, sequence_parallel=False), counts > 0
            padded = topology.with_cp_size(topology.cp_size).padded_seq_len(padded)
            tokens = np.bincount(np.repeat(np.arange(num_rows), counts), padded, num_rows).astype(np.int64)
            padded[np.cumsum(counts)[has_any] - 1] += np.maximum(self.row_tokens - tokens, 0)[has_any]
        first = np.flatnonzero(np.diff(rows, prepend=-1))
        return replace(
            self,
            topology=topology,
            lengths=np.bincount(rows, self.lengths, num_rows).astype(np.int64),
            num_segments=counts,
            segment_lengths=padded,
            images=None if self.images is None else np.add.reduceat(self.images, first, axis=0),
            home_ranks=None if self.home_ranks is None else self.home_ranks[first],
            rows=None,
            row_tokens=None,
        )


def rows_of(problem: Problem, *, row_tokens: int, num_rows: int) -> NDArray[np.int64] | None:
    """`StepRecord.rows` of a training step: a sample each, or documents that fill rows; None where neither is so."""
    lengths, homes = problem.lengths, problem.home_ranks
    if lengths.size == num_rows:
        return np.arange(num_rows)
    ends = np.cumsum(lengths)
    rows = (ends - lengths) // row_tokens
    whole = lengths.size > 0 and (np.bincount(rows, lengths) == row_tokens).all()
    in_order = homes is not None and (np.diff(homes) >= 0).all()  # so that a rank's rows follow one another
    return rows if whole and in_order and ends[-1] == num_rows * row_tokens else None


def rank_slowdowns(costs: NDArray[np.float64], *, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """`[num_ranks]` measured over predicted time of each rank, over that of the median rank; the median step.

    Args:
        costs: `[num_steps, num_ranks]` predicted, in any unit.
        seconds: the same measured, of ranks that wait for no other within a step; steps with a 0 are left out.

    Examples:
        >>> rank_slowdowns(np.array([[8, 16, 8], [16, 16, 8]]), seconds=np.array([[1, 2, 2], [2, 2, 2]])).tolist()
        [1.0, 1.0, 2.0]
    """
    is_known = ((costs > 0) & (seconds > 0)).all(axis=1)
    if not is_known.any():
        return np.full(costs.shape[1:], np.nan)
    ratios = seconds[is_known] / costs[is_known]
    return np.median(ratios / np.median(ratios, axis=1, keepdims=True), axis=0)


def round_robin(num_samples: int, *, dp_size: int) -> NDArray[np.int64]:
    """`[num_samples]` the rank that loads each sample: Megatron's sampler deals them out one by one."""
    return np.arange(num_samples, dtype=np.int64) % dp_size
