"""Steepest descent on a packing: repeats the best single move or swap that relieves the slowest group.

Bins stand in groups. In a group they are sorted by cost and cut into rows, and the group takes the sum of the costliest
bins of its rows. With one bin to a row that is the sum of its bins. A swap exchanges an item of one of those costliest
bins with an item elsewhere. A move is a swap with nothing, so that every bin also offers an item of no cost and no
weight. Over-long items do not move. Each round compares all pairs at once and takes the best; the search ends where no
pair helps. Work is limited by the number of pairs, so that the end does not depend on the speed of the machine.

Invariants: no bin gets heavier than its capacity, no bin is emptied, and the slowest group never gets slower.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_PAIRS = 4_000_000
"""Most pairs that one call compares; about 0.1 s."""

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
        """The relief of each item to its bin, and a mask of those with room for the exchange.

        Args:
            items: `[num_items]` of the critical bins.

        Returns:
            `[num_items, num_partners]` cost that leaves the item's bin, and a mask of what is allowed.
        """
        from_bins, extra = self.bin_of[items], self.weights[items, None] - self.partner_weights
        moved = self.costs[items, None] - self.partner_costs
        allowed = (moved > 0) & self.movable
        allowed &= (extra <= self.room[self.bin_of]) & (-extra <= self.room[from_bins][:, None])
        # A move must leave another item in the bin.
        allowed[:, self.costs.size :] &= (self.counts[from_bins] > 1)[:, None]
        return moved, allowed & (from_bins[:, None] != self.bin_of)

    def exchange(self, item: int, partner: int) -> None:
        """Swaps an item with another, or moves it to the bin of an empty partner."""
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


def refine(
    costs: NDArray[np.int64],
    *,
    weights: NDArray[np.int64],
    capacity: int,
    bin_of: NDArray[np.int64],
    num_groups: int,
    bins_per_group: int,
    bins_per_row: int = 1,
    shared: NDArray[np.int64] | None = None,
    target: int = 0,
) -> NDArray[np.int64]:
    """Lowers the time of the slowest group.

    Args:
        costs: `[num_items]` non-negative.
        weights: `[num_items]` room each item takes.
        capacity: room of a bin.
        bin_of: `[num_items]` the packing to start from, bins group by group.
        num_groups: groups.
        bins_per_group: bins of a group, a multiple of `bins_per_row`.
        bins_per_row: bins of a row.
        shared: `[num_items]` additional cost of an item for its group, over all bins of a row; None for none.
        target: time of a group at which to stop.

    Returns:
        `[num_items]` bin of each item.
    """
    num_items, num_bins = costs.size, num_groups * bins_per_group
    bins = _Bins.of(costs, weights=weights, capacity=capacity, bin_of=bin_of, num_bins=num_bins)
    # Times are in units of 1/bins_per_row of a cost, so that shared costs stay whole.
    partner_shared = np.zeros(num_items + num_bins, dtype=np.int64)
    if shared is not None:
        partner_shared[:num_items] = shared
    num_pairs = 0
    while num_items:
        rows = _Rows.of(bins.heights.reshape(num_groups, bins_per_group), bins_per_row=bins_per_row)
        group_of = bins.bin_of // bins_per_group
        times = bins_per_row * rows.highest.sum(axis=1)
        np.add.at(times, group_of, partner_shared)
        slowest = int(times.argmax())
        own = group_of[:num_items] == slowest
        items = np.flatnonzero(own & rows.is_highest[bins.bin_of[:num_items]] & bins.movable[:num_items])
        num_pairs += items.size * bins.bin_of.size
        if times[slowest] <= bins_per_row * target or num_pairs > MAX_PAIRS or not items.size:
            break
        moved, allowed = bins.gains(items)
        from_row, to_row = rows.row_of_bin[bins.bin_of[items]][:, None], rows.row_of_bin[bins.bin_of]
        highest, second = rows.highest.reshape(-1), rows.second.reshape(-1)
        lowered = np.maximum(highest[from_row] - moved, second[from_row])
        raised = bins.heights[bins.bin_of] + moved
        # Where both bins are in one row, only the higher of them is waited for.
        raised_by = np.maximum(raised - np.where(from_row == to_row, lowered, highest[to_row]), 0)
        lowered_by = highest[from_row] - lowered
        moved_shared = partner_shared[items, None] - partner_shared
        left = times[slowest] - bins_per_row * lowered_by - moved_shared
        other = times[group_of] + bins_per_row * raised_by + moved_shared
        # An exchange within the group changes one time only.
        within = left + moved_shared + bins_per_row * raised_by
        slower = np.where(group_of == slowest, within, np.maximum(left, other))
        slower[~allowed] = _NO_PAIR
        best = int(slower.argmin())
        if slower.flat[best] >= times[slowest]:
            break
        bins.exchange(int(items[best // bins.bin_of.size]), best % bins.bin_of.size)
    return bins.result()


@dataclass(frozen=True)
class _Rows:
    """Bins of each group sorted by cost and cut into rows.

    Attributes:
        row_of_bin: `[num_bins]` row of each bin, numbered through all groups.
        is_highest: `[num_bins]` True where its row waits for the bin; one of equals.
        highest: `[num_groups, num_rows]` cost of the costliest bin.
        second: `[num_groups, num_rows]` cost of the next.
    """

    row_of_bin: NDArray[np.int64]
    is_highest: NDArray[np.bool_]
    highest: NDArray[np.int64]
    second: NDArray[np.int64]

    @classmethod
    def of(cls, heights: NDArray[np.int64], *, bins_per_row: int) -> _Rows:
        num_groups, bins_per_group = heights.shape
        order = np.argsort(-heights, axis=1, kind="stable")
        rows = np.take_along_axis(heights, order, axis=1).reshape(num_groups, -1, bins_per_row)
        first_bin = np.arange(num_groups, dtype=np.int64)[:, None] * bins_per_group
        in_order: NDArray[np.int64] = (order + first_bin).reshape(-1)
        row_of_bin = np.empty_like(in_order)
        row_of_bin[in_order] = np.arange(in_order.size) // bins_per_row
        is_highest = np.zeros(in_order.size, dtype=np.bool_)
        is_highest[in_order[::bins_per_row]] = True
        second = rows[:, :, 1] if bins_per_row > 1 else np.zeros_like(rows[:, :, 0])
        return cls(row_of_bin=row_of_bin, is_highest=is_highest, highest=rows[:, :, 0], second=second)
