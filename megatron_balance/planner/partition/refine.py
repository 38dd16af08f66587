"""Steepest descent on a packing: the best single move or swap that relieves the critical bin, again and again.

A swap exchanges item i of a critical bin with item j elsewhere; a move is a swap with nothing, so that
every bin also offers an item of no cost and no weight. Over-long items stay where they are. Each round
looks at all pairs at once, takes the best, and ends where none helps. Rounds are counted in pairs looked
at, so that the end does not depend on the speed of the machine.

Kept: no bin gets heavier than its capacity, no bin is emptied, and the objective never grows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_PAIRS = 4_000_000
"""Pairs that one call looks at; about 0.1 s."""

_NO_PAIR = np.iinfo(np.int64).max


@dataclass
class _Bins:
    """The packing as it changes. A partner is an item, or nothing at all in some bin."""

    costs: NDArray[np.int64]
    weights: NDArray[np.int64]
    room: NDArray[np.int64]
    counts: NDArray[np.int64]
    heights: NDArray[np.int64]
    bin_of: NDArray[np.int64]
    partner_costs: NDArray[np.int64]
    partner_weights: NDArray[np.int64]
    movable: NDArray[np.bool_]

    @classmethod
    def of(
        cls,
        costs: NDArray[np.int64],
        *,
        weights: NDArray[np.int64],
        capacity: int,
        bin_of: NDArray[np.int64],
        num_bins: int,
    ) -> _Bins:
        room = np.full(num_bins, capacity, dtype=np.int64)
        np.subtract.at(room, bin_of, weights)
        heights = np.zeros(num_bins, dtype=np.int64)
        np.add.at(heights, bin_of, costs)
        nothing = np.zeros(num_bins, dtype=np.int64)
        return cls(
            costs=costs,
            weights=weights,
            room=room,
            counts=np.bincount(bin_of, minlength=num_bins),
            heights=heights,
            bin_of=np.concatenate([bin_of, np.arange(num_bins)]),
            partner_costs=np.concatenate([costs, nothing]),
            partner_weights=np.concatenate([weights, nothing]),
            movable=np.concatenate([weights <= capacity, room >= 0]),
        )

    def gains(self, items: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """What each item would take off its bin, and whether there is room for the exchange.

        Args:
            items: `[num_items]` of the critical bins.

        Returns:
            `[num_items, num_partners]` cost that leaves the item's bin, and a mask of what is allowed.
        """
        from_bins, extra = self.bin_of[items], self.weights[items, None] - self.partner_weights
        moved = self.costs[items, None] - self.partner_costs
        allowed = (moved > 0) & self.movable
        allowed &= (extra <= self.room[self.bin_of]) & (-extra <= self.room[from_bins][:, None])
        # Nothing may come in return only where something stays.
        allowed[:, self.costs.size :] &= (self.counts[from_bins] > 1)[:, None]
        return moved, allowed & (from_bins[:, None] != self.bin_of)

    def exchange(self, item: int, partner: int) -> None:
        """Swaps an item with another, or moves it to the bin of a partner that is nothing."""
        one, other = int(self.bin_of[item]), int(self.bin_of[partner])
        moved = int(self.costs[item] - self.partner_costs[partner])
        extra = int(self.weights[item] - self.partner_weights[partner])
        self.heights[one] -= moved
        self.heights[other] += moved
        self.room[one] += extra
        self.room[other] -= extra
        self.bin_of[item] = other
        if partner < self.costs.size:
            self.bin_of[partner] = one
        else:
            self.counts[one] -= 1
            self.counts[other] += 1

    def result(self) -> NDArray[np.int64]:
        return self.bin_of[: self.costs.size].copy()


def refine_parts(
    costs: NDArray[np.int64],
    *,
    weights: NDArray[np.int64],
    capacity: int,
    bin_of: NDArray[np.int64],
    bins_per_part: int,
    num_parts: int,
    target: int = 0,
) -> NDArray[np.int64]:
    """Lowers the costliest part, where a part is a run of `bins_per_part` bins and costs their sum.

    Args:
        costs: `[num_items]` non-negative.
        weights: `[num_items]` room each item takes.
        capacity: room of a bin.
        bin_of: `[num_items]` the packing to start from.
        bins_per_part: bins of a part.
        num_parts: parts.
        target: cost of a part that is good enough to stop at.

    Returns:
        `[num_items]` bin of each item.
    """
    bins = _Bins.of(costs, weights=weights, capacity=capacity, bin_of=bin_of, num_bins=num_parts * bins_per_part)
    num_pairs = 0
    while costs.size:
        loads = bins.heights.reshape(num_parts, bins_per_part).sum(axis=1)
        critical = int(loads.argmax())
        part_of = bins.bin_of // bins_per_part
        items = np.flatnonzero((part_of[: costs.size] == critical) & bins.movable[: costs.size])
        num_pairs += items.size * part_of.size
        if loads[critical] <= target or num_pairs > MAX_PAIRS or not items.size:
            break
        moved, allowed = bins.gains(items)
        higher = np.maximum(loads[critical] - moved, loads[part_of] + moved)
        higher[~allowed | (part_of == critical)] = _NO_PAIR
        best = int(higher.argmin())
        if higher.flat[best] >= loads[critical]:
            break
        bins.exchange(int(items[best // part_of.size]), best % part_of.size)
    return bins.result()


def refine_rows(
    costs: NDArray[np.int64],
    *,
    weights: NDArray[np.int64],
    capacity: int,
    bin_of: NDArray[np.int64],
    num_bins: int,
    bins_per_row: int,
    target: int = 0,
) -> NDArray[np.int64]:
    """Lowers the sum over rows of the costliest bin, where rows are cut from the bins in order of cost.

    Args:
        costs: `[num_items]` non-negative.
        weights: `[num_items]` room each item takes.
        capacity: room of a bin.
        bin_of: `[num_items]` the packing to start from.
        num_bins: bins, a multiple of `bins_per_row`.
        bins_per_row: bins of a row.
        target: sum that is good enough to stop at.

    Returns:
        `[num_items]` bin of each item.
    """
    bins = _Bins.of(costs, weights=weights, capacity=capacity, bin_of=bin_of, num_bins=num_bins)
    num_pairs = 0
    while costs.size:
        order = np.argsort(-bins.heights, kind="stable")
        row_of_bin = np.empty(num_bins, dtype=np.int64)
        row_of_bin[order] = np.arange(num_bins) // bins_per_row
        rows = bins.heights[order].reshape(-1, bins_per_row)
        highest = rows[:, 0]
        second = rows[:, 1] if bins_per_row > 1 else np.zeros_like(highest)
        is_highest = np.zeros(num_bins, dtype=np.bool_)
        is_highest[order[::bins_per_row]] = True
        items = np.flatnonzero(is_highest[bins.bin_of[: costs.size]] & bins.movable[: costs.size])
        num_pairs += items.size * bins.bin_of.size
        if highest.sum() <= target or num_pairs > MAX_PAIRS or not items.size:
            break
        moved, allowed = bins.gains(items)
        from_row, to_row = row_of_bin[bins.bin_of[items]][:, None], row_of_bin[bins.bin_of]
        lowered = np.maximum(highest[from_row] - moved, second[from_row])
        raised = np.maximum(bins.heights[bins.bin_of] + moved, highest[to_row])
        # Where both bins are in one row, only the higher of them is waited for.
        raised_here = np.maximum(bins.heights[bins.bin_of] + moved, lowered)
        change = np.where(
            from_row == to_row, raised_here - highest[from_row], lowered - highest[from_row] + raised - highest[to_row]
        )
        change[~allowed] = _NO_PAIR
        best = int(change.argmin())
        if change.flat[best] >= 0:
            break
        bins.exchange(int(items[best // bins.bin_of.size]), best % bins.bin_of.size)
    return bins.result()
