"""Dense fill: bins of limited room and height take the costliest items that fit, all bins at once, round by round.

Where a large item makes a row of bins high, everything beside it is free up to that height. Room is what runs out
first, and of samples the longest cost most for a token. So each bin takes the costliest item that fits, then the
costliest that fits into what is left, until none does.

    1. bins are sorted by the first item, in order of falling cost, that fits them by cost and by weight
    2. each takes that item, or the next that no earlier bin has taken, which costs and weighs no more
    3. bins that took one continue with the next round; the others are done
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def dense_fill(
    costs: NDArray[np.int64], *, weights: NDArray[np.int64], slack: NDArray[np.int64], room: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Fills bins by `slack` and `room` with the costliest items that fit.

    Args:
        costs: `[num_items]` falling.
        weights: `[num_items]` room each item takes. Where they do not fall with the costs, an item may be skipped.
        slack: `[num_bins]` cost that each bin still takes.
        room: `[num_bins]` weight that each bin still takes; below 0 for a closed one.

    Returns:
        `[num_items]` bin of each item, -1 for those that are left.

    Example:
        >>> five = np.array([5, 4, 3, 2, 1])
        >>> dense_fill(five, weights=five, slack=np.array([6, 5]), room=np.array([9, 7])).tolist()
        [0, 1, -1, -1, 0]
    """
    bin_of = np.full(costs.size, -1, dtype=np.int64)
    slack, room = slack.copy(), room.copy()
    free, bins = np.arange(costs.size), np.arange(slack.size)
    rising = -costs
    # From each item on, none is heavier than this; falling, so that it can be searched.
    heaviest = np.maximum.accumulate(weights[::-1])[::-1]
    while free.size and bins.size:
        by_cost = rising.searchsorted(-slack[bins])
        by_weight = (-heaviest).searchsorted(-room[bins])
        first = np.maximum(by_cost, by_weight)
        order = first.argsort(kind="stable")
        steps = np.arange(bins.size)
        # No two bins take the same item: each one's is at least one behind that of the bin before.
        taken = np.maximum.accumulate(first[order] - steps) + steps
        taken = taken[taken < free.size]
        bins, items = bins[order[: taken.size]], free[taken]
        bin_of[items] = bins
        slack[bins] -= costs[items]
        room[bins] -= weights[items]
        left = np.ones(free.size, dtype=np.bool_)
        left[taken] = False
        free, rising, heaviest = free[left], rising[left], heaviest[left]
    return bin_of
