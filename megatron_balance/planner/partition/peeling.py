"""Peeling: packs the rows of bins that a large item makes high, before all other rows.

A row of bins lasts as long as its costliest bin. The costliest item left makes its row at least as high as itself, and
up to that height the rest of the row is free.

    1. a row whose costliest item is above the even height of all that is left is high; others are not peeled
    2. its bins take the costliest items that fit below that height (`dense_fill.py`)
    3. where items also cost their row a shared part, the cheapest are removed until the row is within its limit
    4. again with what is left

Rows nearly as high as the highest are peeled together: with hundreds of groups of bins there are hundreds of rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_balance.planner.partition.dense_fill import dense_fill


def peel_rows(
    costs: NDArray[np.int64],
    *,
    shared: NDArray[np.int64],
    weights: NDArray[np.int64],
    capacity: int,
    num_rows: int,
    bins_per_row: int,
    limit: int | None,
) -> tuple[NDArray[np.int64], int]:
    """Packs the high ones of `num_rows` rows; at least one row is left for the items that are left.

    Args:
        costs: `[num_items]` positive.
        shared: `[num_items]` cost that all bins of an item's row share.
        weights: `[num_items]` room each item takes; one above `capacity` gets a bin of its own.
        capacity: room of a bin.
        num_rows: rows in all.
        bins_per_row: bins of a row.
        limit: cost of a row, its height and a bin's part of the shared cost; None for no limit, 0 for bare rows.

    Returns:
        bin_of: `[num_items]` `row * bins_per_row + column`, -1 for the items that are left.
        num_high: rows that were packed.
    """
    bin_of = np.full(costs.size, -1, dtype=np.int64)
    # An over-long item fills its bin, and none that weighs nothing joins it.
    needed = weights.clip(1, capacity)
    free = np.lexsort((-weights, -costs))
    num_high = 0
    while free.size and num_high < num_rows - 1:
        left = num_rows - num_high
        # Each row's costliest item, were no other put beside those of the rows before.
        heights = costs[free[::bins_per_row]][: left - 1]
        is_high = heights * (bins_per_row * left) > int(costs[free].sum())
        count = int((is_high & (4 * heights >= 3 * heights[0])).sum())
        if not count:
            break
        heights = heights[:count]
        if limit == 0:
            # Bare rows keep their costliest item alone.
            bins = np.full(free.size, -1, dtype=np.int64)
            firsts = np.arange(0, count * bins_per_row, bins_per_row)
            bins[firsts] = firsts
        else:
            bins = dense_fill(
                costs[free],
                weights=needed[free],
                slack=np.repeat(heights, bins_per_row),
                room=np.full(count * bins_per_row, capacity),
            )
        if limit:
            _give_back(bins, shared=shared[free], most=(limit - heights) * bins_per_row, bins_per_row=bins_per_row)
        packed = bins >= 0
        bin_of[free[packed]] = num_high * bins_per_row + bins[packed]
        free = free[~packed]
        num_high += count
    return bin_of, num_high


def _give_back(
    bins: NDArray[np.int64], *, shared: NDArray[np.int64], most: NDArray[np.int64], bins_per_row: int
) -> None:
    """Takes items out of rows of more than `most` shared cost, in place: the cheapest, which come last, first."""
    packed = np.flatnonzero(bins >= 0)
    packed = packed[np.argsort(bins[packed] // bins_per_row, kind="stable")]
    row = bins[packed] // bins_per_row
    sums = np.cumsum(shared[packed])
    first = row.searchsorted(np.arange(most.size))
    before = sums[first] - shared[packed[first]]
    over = sums - before[row] > most[row]
    # The item that makes the row high stays in any case.
    over[first] = False
    bins[packed[over]] = -1
