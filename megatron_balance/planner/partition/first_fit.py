"""First fit: every item goes into the first bin that has room for it, else into a new one.

Source: D. S. Johnson, "Near-optimal bin packing algorithms" (1973). A binary tree over the bins, whose
nodes hold the most room below them, finds the first fit in logarithmic time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError


def first_fit(
    weights: Sequence[int] | NDArray[np.int64], *, capacity: int, decreasing: bool = False
) -> list[list[int]]:
    """Packs items into bins of `capacity`.

    Args:
        weights: `[num_items]` non-negative integers. One above `capacity` gets a bin of its own.
        capacity: the most that the weights in a bin may sum to.
        decreasing: take the heaviest first, instead of the order of arrival.

    Returns:
        Lists of item indices, ascending in each bin; bins in the order they were opened.

    Raises:
        BalanceError: `capacity` is below 1.

    Example:
        >>> first_fit([5, 4, 3, 2, 9], capacity=7)
        [[0, 3], [1, 2], [4]]
    """
    if capacity < 1:
        raise BalanceError(f"capacity is {capacity}: it must be at least 1.")
    values = [int(weight) for weight in weights]
    order = sorted(range(len(values)), key=lambda item: (-values[item], item)) if decreasing else range(len(values))
    width = 1 << max(len(values) - 1, 0).bit_length()
    # Leaf `width + b` is the room in bin b. All bins exist from the start, the unopened ones empty.
    room = [capacity] * (2 * width)
    bins: list[list[int]] = []
    for item in order:
        weight = values[item]
        over_long = weight > capacity
        if over_long:
            node = width + len(bins)
        else:
            node = 1
            while node < width:
                node *= 2
                if room[node] < weight:
                    node += 1
        index = node - width
        if index == len(bins):
            bins.append([])
        bins[index].append(item)
        # Below zero: closed to items of no weight as well.
        room[node] = -1 if over_long else room[node] - weight
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return [sorted(items) for items in bins]
