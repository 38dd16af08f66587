"""The integers that describe a step to ranks of its model replica that load no data: its shape, and its lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from megatron_balance.mcore.step.balanced_step import BalancedStep
from megatron_balance.mcore.step.figures import Figures
from megatron_balance.mcore.step.leaf_slots import LeafSlots
from megatron_balance.topology import Topology


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
