"""The data of one step on one rank, and the integers that describe it to ranks of its replica that load none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatron_balance.mcore.step.figures import Figures
from megatron_balance.planner import DataSchedule
from megatron_balance.topology import Topology

Microbatch = dict[str, Tensor]


@dataclass(frozen=True)
class LeafSlots:
    """The micro-batches of one leaf, in slot order.

    Attributes:
        cp_sizes: leaves that share the micro-batch.
        num_tokens: of the whole micro-batch, padding and filler included.
        sequence_lengths: of the whole micro-batch, without padding and filler.
    """

    cp_sizes: list[int]
    _: KW_ONLY
    num_tokens: list[int]
    sequence_lengths: list[list[int]]

    def to_numbers(self) -> list[int]:
        """Encode as integers, for ranks that read no data."""
        numbers = [len(self.cp_sizes), *self.cp_sizes, *self.num_tokens]
        return numbers + [number for lengths in self.sequence_lengths for number in (len(lengths), *lengths)]

    @classmethod
    def from_numbers(cls, numbers: Iterator[int]) -> LeafSlots:
        """Decode one leaf from the front of the numbers."""
        num_slots = next(numbers)
        cp_sizes, num_tokens = (list(islice(numbers, num_slots)) for _ in range(2))
        lengths = [list(islice(numbers, next(numbers))) for _ in range(num_slots)]
        return cls(cp_sizes, num_tokens=num_tokens, sequence_lengths=lengths)


@dataclass(frozen=True)
class BalancedStep:
    """The data of one step on this rank.

    Attributes:
        num_microbatches: the same on every rank, unless `cp_sizes` are given.
        microbatch_tokens: `[num_microbatches]`, tokens of this replica's micro-batches as they run, filler included.
        step_tokens: those of all replicas; 0 on a rank that reads no data.
        sequence_lengths: `[num_microbatches]`, tokens of each sequence of theirs, without padding and filler; None on a
            rank that reads no data and was not sent them.
        microbatches: packed, or None on a rank that reads no data.
        schedule: the plan, or None on a rank that reads no data.
        fingerprint: of the plan and the tokens, in [0, 2**63): equal on all ranks of a model replica that read data.
        plan_seconds: spent planning.
        exchange_seconds: spent splitting, gathering, rerouting, packing and agreeing.
        exposed_seconds: spent waiting for all that when the step began; the rest ran during the step before.
        new_iterator: whether some rank of the data-parallel group read it from another iterator than its last step.
        num_left: items pulled ahead from an earlier iterator, which wait for it to come again.
        cp_sizes: `[num_microbatches]` context-parallel ranks of each, or None where all have the run's. With sizes,
            other ranks may have another num_microbatches.
        number: of the step, counted from 0 on a rank that reads data.
        reported: `[dp_size, NUM_REPORTED]` numbers that each data-parallel rank sent with the lengths of its samples.
        figures: for the log, where they are known.
        leaves: what each context-parallel rank of this replica runs, where sizes differ; None elsewhere.
    """

    num_microbatches: int
    microbatch_tokens: list[int]
    step_tokens: int = 0
    sequence_lengths: list[list[int]] | None = None
    microbatches: list[Microbatch] | None = None
    schedule: DataSchedule | None = None
    fingerprint: int = 0
    plan_seconds: float = 0.0
    exchange_seconds: float = 0.0
    exposed_seconds: float = 0.0
    new_iterator: bool = False
    num_left: int = 0
    cp_sizes: list[int] | None = None
    leaves: tuple[LeafSlots, ...] | None = None
    number: int = 0
    reported: NDArray[np.int64] | None = None
    figures: Figures | None = None


def numbers_of(step: BalancedStep, *, with_lengths: bool) -> list[int]:
    """Encode a step.

    Args:
        step: made by this rank.
        with_lengths: include the lengths of its sequences. Sizes of context parallelism always come with them.
    """
    assert step.figures is not None, "this rank planned the step"
    figures = np.array(step.figures.row()).view(np.int64).tolist()
    if step.leaves is not None:
        return [number for leaf in step.leaves for number in leaf.to_numbers()] + figures
    numbers = [step.num_microbatches, *step.microbatch_tokens]
    if with_lengths:
        assert step.sequence_lengths is not None, "this rank packed the step"
        numbers += [number for lengths in step.sequence_lengths for number in (len(lengths), *lengths)]
    return numbers + figures


def step_of(numbers: Sequence[int], *, topology: Topology, cp_rank: int, with_lengths: bool) -> BalancedStep:
    """The step that another rank of the replica encoded.

    Args:
        numbers: of `numbers_of`.
        topology: the ranks.
        cp_rank: context-parallel rank of this one.
        with_lengths: as it was encoded.
    """
    rest = iter(numbers)
    if topology.dynamic_cp:
        leaves = tuple(LeafSlots.from_numbers(rest) for _ in range(topology.cp_size))
        own = leaves[cp_rank]
        return BalancedStep(
            len(own.cp_sizes),
            own.num_tokens,
            sequence_lengths=own.sequence_lengths,
            cp_sizes=own.cp_sizes,
            leaves=leaves,
            figures=_figures_of(rest),
        )
    num_microbatches = next(rest)
    tokens = list(islice(rest, num_microbatches))
    lengths = [list(islice(rest, next(rest))) for _ in tokens] if with_lengths else None
    return BalancedStep(num_microbatches, tokens, sequence_lengths=lengths, figures=_figures_of(rest))


def _figures_of(rest: Iterator[int]) -> Figures:
    return Figures.of_row(np.array(list(rest), dtype=np.int64).view(np.float64).tolist())
