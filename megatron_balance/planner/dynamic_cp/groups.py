"""Groups of ranks that share micro-batches: the result of the planners in this package."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_balance.planner.dynamic_cp.samples import SizedSamples


@dataclass(frozen=True)
class Groups:
    """Micro-batches with their ranks.

    A group of `2**level` leaves starts at a multiple of its size, and all its leaves run it in the same slot.

    Attributes:
        group_of: `[num_samples]` int64 group of each sample.
        levels: `[num_groups]` int64, log2 of the leaves of a group.
        first_leaves: `[num_groups]` int64, the first of them.
        slots: `[num_groups]` int64.
        num_slots: `[num_leaves]` int64 micro-batches of each leaf; slots without a group are dummies.
    """

    group_of: NDArray[np.int64]
    levels: NDArray[np.int64]
    first_leaves: NDArray[np.int64]
    slots: NDArray[np.int64]
    num_slots: NDArray[np.int64]

    @classmethod
    def of_slots(cls, slot_of: NDArray[np.int64], *, cp_sizes: NDArray[np.int64]) -> Groups:
        """The groups of a plan in the form of run records.

        Args:
            slot_of: `[num_samples]` int64 `first_leaf * num_microbatches + slot` of each sample's group.
            cp_sizes: `[num_leaves, num_microbatches]` int64 leaves that share a micro-batch, 1 for a dummy, 0 where a
                leaf has no such slot.
        """
        places, group_of = np.unique(slot_of, return_inverse=True)
        first_leaves, slots = np.divmod(places, cp_sizes.shape[1])
        levels = np.log2(cp_sizes[first_leaves, slots]).astype(np.int64)
        return cls(group_of, levels, first_leaves, slots, (cp_sizes > 0).sum(axis=1))

    def group_grid(self) -> NDArray[np.int64]:
        """The group of every leaf in every slot, `[num_leaves, max(num_slots)]`; -1 for none."""
        grid = np.full((self.num_slots.size, int(self.num_slots.max())), -1, dtype=np.int64)
        for level in range(int(self.levels.max(initial=0)) + 1):
            here = np.flatnonzero(self.levels == level)
            leaves = self.first_leaves[here, None] + np.arange(1 << level)
            grid[leaves, self.slots[here, None]] = here[:, None]
        return grid

    def cost_grid(self, samples: SizedSamples) -> NDArray[np.int64]:
        """Cost of every leaf in every slot, as `group_grid`: dummies cost `per_microbatch`, slots beyond the last 0."""
        of_groups = np.full(self.levels.size, samples.per_microbatch, dtype=np.int64)
        np.add.at(of_groups, self.group_of, samples.costs_at(self.levels[self.group_of]))
        costs = np.append(of_groups, samples.per_microbatch)[self.group_grid()]
        costs[np.arange(costs.shape[1]) >= self.num_slots[:, None]] = 0
        return costs

    def of_leaves(self) -> list[list[int]]:
        """The groups of every leaf in the order of its slots, -1 for a dummy."""
        counts: list[int] = self.num_slots.tolist()
        slots: list[list[int]] = self.group_grid().tolist()
        return [groups[:count] for groups, count in zip(slots, counts, strict=True)]
