"""Cost and tokens of every sample at every context-parallel size.

The cost of a sample of L tokens on each of the c = 2**level ranks that share it is, rounded up,

    (linear*L + quadratic*L² + ...) / c  +  cp_exchange * L * (c - 1) / c  +  per_sequence

with L padded for that size: a larger size means less computation and more exchange on each rank.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class SizedSamples:
    """The samples of one global batch, each shared by 1, 2, 4 … ranks.

    Attributes:
        costs: `[num_levels, num_samples]` int64, cost on each of the `2**level` ranks that share a sample.
        tokens: `[num_levels, num_samples]` int64, padded tokens on each of them.
        capacity: tokens that a rank holds in one micro-batch.
        per_microbatch: fixed cost of a micro-batch on each of its ranks.
        num_leaves: ranks that micro-batches are spread over.
    """

    costs: NDArray[np.int64]
    _: KW_ONLY
    tokens: NDArray[np.int64]
    capacity: int
    per_microbatch: int
    num_leaves: int

    @property
    def num_levels(self) -> int:
        """Sizes to choose from: 1, 2, 4 … `2**(num_levels - 1)` ranks."""
        return self.costs.shape[0]

    @property
    def num_samples(self) -> int:
        """Samples in the global batch."""
        return self.costs.shape[1]

    @cached_property
    def least_levels(self) -> NDArray[np.int64]:
        """The smallest size with room for a sample alone, `[num_samples]`; the largest size for over-long ones."""
        return np.minimum((self.tokens > self.capacity).sum(axis=0), self.num_levels - 1)

    @cached_property
    def least_costs(self) -> NDArray[np.int64]:
        """Cost on each rank at that size, `[num_samples]`."""
        return self.costs_at(self.least_levels)

    @cached_property
    def oversized(self) -> NDArray[np.bool_]:
        """Samples longer than the ranks of the largest size hold, `[num_samples]`: each runs alone."""
        return self.tokens[-1] > self.capacity

    @cached_property
    def room_needed(self) -> int:
        """Tokens of all samples at their smallest size, over all ranks; an over-long one fills its ranks."""
        levels = self.least_levels
        held = np.minimum(self.tokens[levels, np.arange(self.num_samples)], self.capacity)
        return int((held << levels).sum())

    def costs_at(self, levels: NDArray[np.int64]) -> NDArray[np.int64]:
        """Cost on each rank, `[num_samples]`, where each sample has a level of its own."""
        return self.costs[levels, np.arange(self.num_samples)]

    def levels_within(self, height: int) -> NDArray[np.int64]:
        """The smallest size with room whose ranks pay at most `height`, `[num_samples]`; else the cheapest."""
        levels = self.least_levels.copy()
        high = np.flatnonzero(self.least_costs > height)
        levels[high], _ = self.raised(high, height=height)
        return levels

    def raised(self, ids: NDArray[np.int64], *, height: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Levels as in `levels_within`, with their costs, for some samples: `[num_ids]` both."""
        costs = self.costs[:, ids]
        has_room = np.arange(self.num_levels)[:, None] >= self.least_levels[ids]
        within = has_room & (costs <= height)
        cheapest = np.where(has_room, costs, np.iinfo(np.int64).max).argmin(axis=0)
        levels = np.where(within.any(axis=0), within.argmax(axis=0), cheapest)
        return levels, costs[levels, np.arange(ids.size)]
