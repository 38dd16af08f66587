"""Lower bound on the number of bins that hold a set of weights.

volume  the sum of the weights over the capacity
pairs   for every a up to half the capacity: items above T-a stand alone, those above T/2 stand apart, and
        the items from a to T/2 that do not fit beside them need bins of their own
        (S. Martello and P. Toth, "Lower bounds and reduction procedures for the bin packing problem", 1990)
steps   for every k: an item counts floor((k+1)w/T)/k, or w/T where (k+1)w/T is whole; no bin counts more
        than 1 (S. P. Fekete and J. Schepers, "New classes of fast lower bounds for bin packing problems", 2001)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MAX_STEPS = 12
"""Largest k of the bound by steps; a larger one would count items of less than a twelfth of a bin."""


def min_num_bins(weights: NDArray[np.int64], *, capacity: int) -> int:
    """Bins of `capacity` that hold all items, at least; at least 1.

    Args:
        weights: `[num_items]` non-negative; one above `capacity` has a bin of its own.
        capacity: room of a bin.
    """
    inside = weights[weights <= capacity]
    num_alone = weights.size - inside.size
    volume = -(-int(inside.sum()) // capacity)
    # An item below T/(MAX_STEPS+1) counts nothing in a step, and where all are, volume is as good as pairs.
    small = inside.size == 0 or int(inside.max()) * (MAX_STEPS + 1) < capacity
    # The other bounds multiply; beyond int64 the volume is the bound.
    if small or capacity * (MAX_STEPS + 1) * inside.size >= 2**62:
        return max(num_alone + volume, 1)
    values, counts = np.unique(inside, return_counts=True)
    return num_alone + max(
        volume,
        _by_pairs(values, counts, capacity=capacity),
        _by_steps(values, counts, capacity=capacity),
        1 - num_alone,
    )


def _by_pairs(values: NDArray[np.int64], counts: NDArray[np.int64], *, capacity: int) -> int:
    """The bound of Martello and Toth. `values`: `[num_values]` ascending, each `counts` times."""
    numbers = np.concatenate([[0], np.cumsum(counts)])
    sums = np.concatenate([[0], np.cumsum(values * counts)])
    half = int(np.searchsorted(values, capacity // 2, side="right"))
    if half == values.size:
        return 0
    # a runs over the values up to T/2; 0 stands for none of them.
    smallest = np.arange(half + 1)
    limits = np.append(values[:half], capacity // 2 + 1)
    alone = np.searchsorted(values, capacity - limits, side="right").clip(half)
    num_large = int(numbers[-1] - numbers[half])
    room = (numbers[alone] - numbers[half]) * capacity - (sums[alone] - sums[half])
    small = sums[half] - sums[smallest]
    return num_large + int((-(-(small - room) // capacity)).clip(0).max())


def _by_steps(values: NDArray[np.int64], counts: NDArray[np.int64], *, capacity: int) -> int:
    """The bound of Fekete and Schepers."""
    steps = np.arange(1, MAX_STEPS + 1)[:, None]
    whole, rest = np.divmod((steps + 1) * values, capacity)
    # In units of 1/(k*T) of a bin.
    units = np.where(rest == 0, values * steps, whole * capacity)
    return int((-(-(units @ counts) // (steps[:, 0] * capacity))).max())
