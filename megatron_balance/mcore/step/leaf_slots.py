"""The micro-batches of one replica's leaves with dynamic context parallelism.

A *leaf* is one context-parallel rank of one data-parallel rank: `dp_rank * cp_size + cp_rank`. The s leaves that share
a micro-batch of size s pack it identically, with sequences padded for s, and each computes its part.

Every rank of a model replica holds the micro-batches of all leaves of the replica, so that all its ranks agree on them.
Leaves of one replica may run different numbers of micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import islice

import numpy as np

from megatron_balance.mcore.setup.shape_buckets import filled_tokens
from megatron_balance.planner import DataSchedule
from megatron_balance.runtime.gathered import GatheredLengths


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


def tokens_of_leaves(schedule: DataSchedule, *, shape_bucket: int) -> list[list[int]]:
    """Tokens of every leaf's micro-batches once they are filled up, over all ranks that share them.

    Args:
        schedule: the plan.
        shape_bucket: `--balance-shape-bucket`.
    """
    sizes = schedule.cp_size_grid
    tokens = schedule.slot_tokens().reshape(len(sizes), -1)
    for size in np.unique(sizes[sizes > 0]).tolist():
        here, topology = sizes == size, schedule.topology.at_cp_size(size)
        tokens[here] = filled_tokens(tokens[here], topology=topology, limits=schedule.limits, shape_bucket=shape_bucket)
    num_slots: list[int] = (sizes > 0).sum(axis=1).tolist()
    return [of_leaf[:count] for of_leaf, count in zip(tokens.tolist(), num_slots, strict=True)]


def leaf_slots(schedule: DataSchedule, *, leaf: int, num_tokens: list[int], gathered: GatheredLengths) -> LeafSlots:
    """The micro-batches that a leaf runs.

    Args:
        schedule: the plan.
        leaf: index of the leaf.
        num_tokens: its row of `tokens_of_leaves`.
        gathered: lengths of the samples that the plan places.
    """
    slots = schedule.ranks[leaf]
    return LeafSlots(
        list(schedule.cp_sizes[leaf]),
        num_tokens=num_tokens,
        sequence_lengths=[_sequence_lengths(slot, gathered=gathered) for slot in slots],
    )


def _sequence_lengths(sample_ids: Sequence[int], *, gathered: GatheredLengths) -> list[int]:
    ids = np.array(sample_ids, dtype=np.int64)
    segments = gathered.segments_of(ids)
    lengths = gathered.lengths[ids].tolist() if segments is None else [n for of_one in segments for n in of_one]
    return [length for length in lengths if length]
