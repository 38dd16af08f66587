"""One step of a run: its lengths, plan and measured seconds, as arrays."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cost.model import CostModel
from megatron_balance.planner import DataSchedule


@dataclass(frozen=True, eq=False)
class StepRecord:
    """One step.

    Attributes:
        iteration: Megatron's count of it, from 1.
        num_microbatches: slots of every rank, or the most of a leaf.
        segment_lengths: `[sum(num_segments)]` int64 original tokens of each sequence.
        num_segments: `[num_samples]` int64 sequences of each sample.
        slot_of: `[num_samples]` int64 `rank * num_microbatches + slot`.
        home_ranks: `[num_samples]` int64 rank that loaded each sample.
        cost_grid: `[dp_size, num_microbatches]` int64 predicted costs, in units of `2**cost_shift`.
        cost_shift: see DataSchedule.
        cost_model: what the step was planned with.
        plan_seconds, exchange_seconds, exposed_seconds: spent planning, moving, and waiting for both.
        seconds: `[dp_size, num_microbatches]` measured, forward and backward; NaN where it was not, 0 where a leaf
            has no such slot.
        cp_sizes: `[num_leaves, num_microbatches]` int64 leaves that share each micro-batch, 1 for a dummy, 0 where a
            leaf has no such slot; None where all have the run's size. With sizes, cost_grid and seconds have a row a
            leaf too, and slot_of holds the first leaf of a sample's group as its rank (DataSchedule).
    """

    _: KW_ONLY
    iteration: int
    num_microbatches: int
    segment_lengths: NDArray[np.int64]
    num_segments: NDArray[np.int64]
    slot_of: NDArray[np.int64]
    home_ranks: NDArray[np.int64]
    cost_grid: NDArray[np.int64]
    cost_shift: int
    cost_model: CostModel
    plan_seconds: float
    exchange_seconds: float
    exposed_seconds: float
    seconds: NDArray[np.float64]
    cp_sizes: NDArray[np.int64] | None = None

    @classmethod
    def of_schedule(
        cls,
        schedule: DataSchedule,
        *,
        iteration: int,
        plan_seconds: float = 0.0,
        exchange_seconds: float = 0.0,
        exposed_seconds: float = 0.0,
    ) -> StepRecord:
        """A step as it was planned, not measured yet."""
        num_samples = schedule.slot_of.size
        cp_sizes = schedule.cp_size_grid if schedule.topology.dynamic_cp else None
        lengths, counts, homes = schedule.segment_lengths, schedule.num_segments, schedule.home_ranks
        return cls(
            iteration=iteration,
            num_microbatches=schedule.num_microbatches,
            segment_lengths=schedule.lengths if lengths is None else lengths,
            num_segments=np.ones(num_samples, dtype=np.int64) if counts is None else counts,
            slot_of=schedule.slot_of,
            home_ranks=np.zeros(num_samples, dtype=np.int64) if homes is None else homes,
            cost_grid=schedule.cost_grid,
            cost_shift=schedule.cost_shift,
            cost_model=schedule.cost_model,
            plan_seconds=plan_seconds,
            exchange_seconds=exchange_seconds,
            exposed_seconds=exposed_seconds,
            seconds=unmeasured(schedule.cost_grid.shape, cp_sizes=cp_sizes),
            cp_sizes=cp_sizes,
        )

    @property
    def lengths(self) -> NDArray[np.int64]:
        """`[num_samples]` original tokens of each sample."""
        samples = np.repeat(np.arange(self.num_segments.size), self.num_segments)
        return np.bincount(samples, weights=self.segment_lengths, minlength=self.num_segments.size).astype(np.int64)


def unmeasured(shape: tuple[int, ...], *, cp_sizes: NDArray[np.int64] | None) -> NDArray[np.float64]:
    """`StepRecord.seconds` before anything was measured."""
    seconds = np.full(shape, np.nan)
    if cp_sizes is not None:
        seconds[cp_sizes == 0] = 0.0
    return seconds
