"""One step of a run: its samples, plan and measured seconds, judged by any cost model, and as stock would run it.

Invariant: steps that are compared hold the same samples, and are judged by the same cost model.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.planner import (
    DataSchedule,
    Images,
    Problem,
    batch_of,
    slowest_over_mean,
    waiting,
)


@dataclass(frozen=True, eq=False, kw_only=True)
class StepRecord(Problem):
    """One step: its samples and ranks (Problem), where samples ran, and how long that took.

    `microbatch_of` and `cp_size_grid` are as in a DataSchedule. Samples need not lie as in a valid schedule (stock).

    Attributes:
        iteration: Megatron's count of it, from 1.
        seconds: `[num_rows, num_microbatches]` measured, forward and backward; NaN where it was not, 0 where a leaf
            has no such slot.
        plan_seconds, exchange_seconds, exposed_seconds: spent planning, moving, and waiting for both.
        rows: `[num_samples]` the row of the data set that each sample lay in, rising from 0; None where rows are not
            known: each in its own, as it is.
        row_tokens: tokens that stock fills known rows up to; None where it runs them as they are.
    """

    iteration: int
    microbatch_of: NDArray[np.int64]
    cp_size_grid: NDArray[np.int64]
    seconds: NDArray[np.float64]
    plan_seconds: float = 0.0
    exchange_seconds: float = 0.0
    exposed_seconds: float = 0.0
    rows: NDArray[np.int64] | None = None
    row_tokens: int | None = None

    @classmethod
    def from_schedule(cls, schedule: DataSchedule, *, iteration: int, **given: Any) -> StepRecord:
        """A step as it was planned, not measured yet. `given`: seconds spent, and rows, by attribute."""
        placed = {"microbatch_of": schedule.microbatch_of, "cp_size_grid": schedule.cp_size_grid}
        return cls(
            **of_problem(schedule), **placed, iteration=iteration, seconds=unmeasured(schedule.cp_size_grid), **given
        )

    @classmethod
    def as_loaded(cls, problem: Problem, *, iteration: int, **rows: Any) -> StepRecord:
        """A step that is not planned: all that a rank loaded is one micro-batch. `rows`: those, by attribute."""
        sizes = np.full((problem.topology.dp_size, 1), problem.topology.cp_size, dtype=np.int64)
        microbatch_of = np.zeros_like(problem.lengths) if problem.home_ranks is None else problem.home_ranks
        placed = {"microbatch_of": microbatch_of, "cp_size_grid": sizes, "seconds": unmeasured(sizes)}
        return cls(**of_problem(problem), **placed, iteration=iteration, **rows)

    @property
    def num_microbatches(self) -> int:
        """Slots of a rank, or the most of a leaf."""
        return self.cp_size_grid.shape[1]

    @cached_property
    def costs(self) -> NDArray[np.float64]:
        """`[num_rows, num_microbatches]` as `DataSchedule.cost_grid`, in units of the cost model."""
        batch = batch_of(self)
        return batch.cost_grid(self.microbatch_of, self.cp_size_grid).astype(np.float64) * float(1 << batch.shift)

    @property
    def is_measured(self) -> bool:
        """True if the micro-batches of every rank were measured."""
        return not np.isnan(self.seconds).any()

    @property
    def is_slowest(self) -> NDArray[np.bool_]:
        """`[num_rows, num_microbatches]` True where the rank is the costliest of those that meet, and was measured.

        Its seconds contain no waiting; those of the other ranks do.
        """
        groups = self.costs.reshape(-1, waiting(self.objective, topology=self.topology).span, self.num_microbatches)
        own = (groups == groups.max(axis=1, keepdims=True)).reshape(self.costs.shape)
        return own & (self.seconds > 0)

    def imbalance(self, grid: NDArray[np.float64]) -> float:
        """`slowest_over_mean` of costs or measured seconds, by the objective of the step."""
        return slowest_over_mean(grid, objective=self.objective, topology=self.topology)

    def owner_slots(self) -> NDArray[np.int64]:
        """`[num_rows, num_microbatches]` the value of `microbatch_of` for the samples of each micro-batch."""
        rows = np.arange(len(self.cp_size_grid))[:, None]
        first = rows - rows % np.maximum(self.cp_size_grid, 1) if self.topology.dynamic_cp else rows
        return first * self.num_microbatches + np.arange(self.num_microbatches)

    def samples(self) -> list[list[list[int]]]:
        """Sample ids of each slot, `[row][slot]`, ascending; the same for all leaves that share it."""
        ids: list[int] = np.argsort(self.microbatch_of, kind="stable").tolist()
        ends: list[int] = np.cumsum(np.bincount(self.microbatch_of, minlength=self.cp_size_grid.size)).tolist()
        held = [ids[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        return [[held[place] for place in row] for row in self.owner_slots().tolist()]

    def stock(self) -> StepRecord:
        """The same data under Megatron's own sampler: every rank runs the rows that it loaded, in that order.

        A micro-batch holds `micro_batch_size` rows where that is the limit, else one. What fills a row up to
        `row_tokens` is computed as part of its last sequence, and counted as padding. All have the context-parallel
        size of the run: also where the run has dynamic sizes rows are data-parallel ranks, with the costs of `cp_size`
        leaves together.
        """
        topology, dp_size, per_slot = self.topology, self.topology.dp_size, self.limits.micro_batch_size or 1
        if self.rows is not None:
            return self._in_rows(self.rows).stock()
        homes = round_robin(self.lengths.size, dp_size=dp_size) if self.home_ranks is None else self.home_ranks
        order, counts = np.argsort(homes, kind="stable"), np.bincount(homes, minlength=dp_size)
        position = np.empty_like(homes)
        position[order] = np.arange(homes.size) - np.repeat(np.cumsum(counts) - counts, counts)
        num_microbatches = max(int(-(-counts.max() // per_slot)), 1)
        sizes = np.full((dp_size, num_microbatches), topology.cp_size, dtype=np.int64)
        return replace(
            self,
            topology=topology.with_cp_size(topology.cp_size),
            cost_model=self.cost_model.summed_over_cp(topology.cp_size) if topology.dynamic_cp else self.cost_model,
            microbatch_of=homes * num_microbatches + position // per_slot,
            home_ranks=homes,
            cp_size_grid=sizes,
            seconds=unmeasured(sizes),
            plan_seconds=0.0,
            exchange_seconds=0.0,
            exposed_seconds=0.0,
        )

    def _in_rows(self, rows: NDArray[np.int64]) -> StepRecord:
        """The step whose samples are its rows as stock runs them; not placed."""
        num_rows = int(rows.max(initial=-1)) + 1
        of_rows = np.bincount(rows, self.lengths, num_rows).astype(np.int64)
        segments = np.ones_like(rows) if self.num_segments is None else self.num_segments
        counts = np.bincount(rows, segments, num_rows).astype(np.int64)
        padded, topology = self.segments, self.topology
        if self.row_tokens is not None:
            # Rows are split among sequence-parallel ranks as a whole, and among context-parallel ones by sequence.
            topology, has_any = replace(topology, sequence_parallel=False), counts > 0
            padded = topology.with_cp_size(topology.cp_size).padded_seq_len(padded)
            filled = np.bincount(np.repeat(np.arange(num_rows), counts), padded, num_rows).astype(np.int64)
            padded[np.cumsum(counts)[has_any] - 1] += np.maximum(self.row_tokens - filled, 0)[has_any]
        first = np.flatnonzero(np.diff(rows, prepend=-1))
        images = None
        if self.images is not None:
            images = Images(np.add.reduceat(self.images.sums, first, axis=0))
        return replace(
            self,
            topology=topology,
            lengths=of_rows,
            num_segments=counts,
            segment_lengths=padded,
            images=images,
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


def of_problem(problem: Problem) -> dict[str, Any]:
    """The fields of a problem, for a step that holds it."""
    return {field.name: getattr(problem, field.name) for field in fields(Problem)}


def round_robin(num_samples: int, *, dp_size: int) -> NDArray[np.int64]:
    """`[num_samples]` the rank that loads each sample: Megatron's sampler deals them out one by one."""
    return np.arange(num_samples, dtype=np.int64) % dp_size


def unmeasured(sizes: NDArray[np.int64]) -> NDArray[np.float64]:
    """`StepRecord.seconds` before anything was measured. `sizes`: its `cp_size_grid`."""
    return np.where(sizes > 0, np.nan, 0.0)
