"""Micro-batches being filled, each with a target cost and a token capacity.

Samples go costliest first to the pack with most slack (target minus cost) that has room, worst-fit decreasing.
With many packs, one round of array operations places all samples that go to distinct packs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_balance.planner.dynamic_cp.samples import SizedSamples

_SCANNED = 256
"""Samples that are tested together for room in any pack."""


class Packs:
    """Packs of all sizes and their samples.

    Attributes:
        levels: `[num_packs]` int64, log2 of the ranks that share a pack.
        slack: `[num_packs]` int64, cost that a pack may take on each of its ranks.
        room: `[num_packs]` int64, tokens that it may take on each of them.
        pack_of: `[num_samples]` int64, -1 until a sample is placed.
        work: effort of filling so far: rounds, each weighted by its packs.
    """

    def __init__(self, samples: SizedSamples) -> None:
        self._samples = samples
        self.levels = np.zeros(0, dtype=np.int64)
        self.slack = np.zeros(0, dtype=np.int64)
        self.room = np.zeros(0, dtype=np.int64)
        self.pack_of = np.full(samples.num_samples, -1, dtype=np.int64)
        self.work = 0

    def open(self, level: int, *, targets: NDArray[np.int64]) -> None:
        """Adds empty packs. `targets`: `[num_new]` cost that each may reach."""
        self.levels = np.concatenate([self.levels, np.full(targets.size, level, dtype=np.int64)])
        self.slack = np.concatenate([self.slack, targets])
        self.room = np.concatenate([self.room, np.full(targets.size, self._samples.capacity, dtype=np.int64)])

    def open_with(self, ids: NDArray[np.int64], *, levels: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """Adds a pack for each of some samples, `[num_new]` all three."""
        self.pack_of[ids] = self.levels.size + np.arange(ids.size)
        self.levels = np.concatenate([self.levels, levels])
        self.slack = np.concatenate([self.slack, targets - self._samples.costs[levels, ids]])
        self.room = np.concatenate([self.room, self._samples.capacity - self._samples.tokens[levels, ids]])

    def pour(self, ids: NDArray[np.int64], *, level: int, first_pack: int = 0) -> NDArray[np.int64]:
        """Places samples in packs of one size.

        Args:
            ids: `[num_ids]` samples, costliest first.
            level: of the packs.
            first_pack: packs before it take nothing.

        Returns:
            The samples that found no room, in the same order.
        """
        packs = first_pack + np.flatnonzero(self.levels[first_pack:] == level)
        if not packs.size or not ids.size:
            return ids
        slack, room = self.slack[packs], self.room[packs]
        costs, tokens = self._samples.costs[level, ids], self._samples.tokens[level, ids]
        left: list[NDArray[np.int64]] = []
        at, end = 0, ids.size
        while at < end:
            cost, held = costs[at], tokens[at]
            self.work += 2048 + packs.size
            (fitting,) = ((slack >= cost) & (room >= held)).nonzero()
            if not fitting.size:
                count = _num_without_room(costs[at:], tokens=tokens[at:], slack=slack, room=room)
                left.append(ids[at : at + count])
                at += count
                continue
            free = slack[fitting]
            # Each pack within one cost of the most slack takes one sample before any of them takes a second.
            (near,) = (free >= free.max() - cost).nonzero()
            chosen = fitting[near[(-free[near]).argsort(kind="stable")[: end - at]]]
            now = slice(at, at + chosen.size)
            # A cheaper sample may hold more tokens and not fit: this round places the samples before it.
            fit = (room[chosen] >= tokens[now]) & (slack[chosen] >= costs[now])
            if not fit.all():
                chosen = chosen[: int(fit.argmin())]
                now = slice(at, at + chosen.size)
            slack[chosen] -= costs[now]
            room[chosen] -= tokens[now]
            self.pack_of[ids[now]] = packs[chosen]
            at += chosen.size
        self.slack[packs], self.room[packs] = slack, room
        return np.concatenate(left) if left else ids[:0]


def _num_without_room(
    costs: NDArray[np.int64], *, tokens: NDArray[np.int64], slack: NDArray[np.int64], room: NDArray[np.int64]
) -> int:
    """Leading samples that fit no pack, among the first `_SCANNED`; the first is known to fit none."""
    costs, tokens = costs[:_SCANNED], tokens[:_SCANNED]
    (able,) = ((slack >= costs.min()) & (room >= tokens.min())).nonzero()
    if not able.size:
        return costs.size
    able = able[(-slack[able]).argsort(kind="stable")]
    most_room = np.maximum.accumulate(room[able])
    num_affordable = (-slack[able]).searchsorted(-costs, side="right")
    fits = (num_affordable > 0) & (most_room[num_affordable - 1] >= tokens)
    return max(int(fits.argmax()), 1) if fits.any() else costs.size
