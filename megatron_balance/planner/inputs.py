"""Turns the arguments of a caller into checked arrays: lengths, segments, home ranks, groups.

A sample may be made of several segments, documents packed into one sequence. Attention does not cross
from one to the next and each is padded by itself, so a sample's tokens and its cost are sums over segments.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError


def as_integers(values: Sequence[int] | NDArray[Any], *, name: str, bits: int = 40) -> NDArray[np.int64]:
    """Non-negative integers as int64, `[num_samples]` → `[num_samples]`.

    Args:
        values: a sequence or an array of integers.
        name: of the argument, for messages.
        bits: entries are at most `2**bits`.

    Raises:
        BalanceError: an entry is negative, not an integer, or too large; names it.
    """
    array = np.asarray(values)
    if array.ndim != 1:
        raise BalanceError(f"{name} has shape {array.shape}: it must have one entry for each sample.")
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if array.dtype.kind not in "iu":
        for index, value in enumerate(cast("Sequence[object]", values)):
            if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
                raise BalanceError(f"{name}[{index}] is {value!r}: it must be an integer of at least 0.")
    wrong = np.flatnonzero((array < 0) | (array > 2**bits))
    if wrong.size:
        index = int(wrong[0])
        raise BalanceError(f"{name}[{index}] is {array[index]}: it must be an integer from 0 to 2**{bits}.")
    return array.astype(np.int64)


def as_num_segments(values: Sequence[int] | NDArray[Any], *, num_lengths: int) -> NDArray[np.int64]:
    """Segments of each sample as int64, `[num_samples]`.

    Args:
        values: `[num_samples]`; a sample may have none.
        num_lengths: number of segment lengths.

    Raises:
        BalanceError: an entry is wrong, or they do not sum to `num_lengths`.
    """
    num_segments = as_integers(values, name="num_segments")
    if int(num_segments.sum()) != num_lengths:
        raise BalanceError(
            f"num_segments sums to {int(num_segments.sum())}: with it, lengths holds the length of every segment, "
            f"and it holds {num_lengths}."
        )
    return num_segments


def sum_segments(values: NDArray[np.int64], *, num_segments: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """Sums over the segments of each sample, `[sum(num_segments)]` → `[num_samples]`; unchanged where None."""
    if num_segments is None:
        return values
    sums = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(values)])
    ends = np.cumsum(num_segments)
    return sums[ends] - sums[ends - num_segments]


def as_home_ranks(values: Sequence[int] | NDArray[Any], *, num_samples: int, dp_size: int) -> NDArray[np.int64]:
    """The rank that loaded each sample as int64, `[num_samples]`.

    Raises:
        BalanceError: an entry is no rank, or there is not one for each sample.
    """
    homes = as_integers(values, name="home_ranks")
    if homes.size != num_samples:
        raise BalanceError(f"home_ranks has {homes.size} entries: it must have one for each of {num_samples} lengths.")
    if homes.size and int(homes.max()) >= dp_size:
        index = int(homes.argmax())
        raise BalanceError(f"home_ranks[{index}] is {homes[index]}: it must be below dp_size {dp_size}.")
    return homes


def number_groups(groups: Sequence[Hashable] | NDArray[Any]) -> NDArray[np.int64]:
    """Groups numbered by their first sample, so that any id will do: a number, a string, a uuid.

    Args:
        groups: `[num_samples]` id of the group of each sample; equal ids need not stand together.

    Returns:
        `[num_samples]` int64 from 0.

    Raises:
        BalanceError: the ids have another shape, or one cannot be compared.

    Example:
        >>> number_groups(["b", "a", "b"]).tolist()
        [0, 1, 0]
    """
    if isinstance(groups, np.ndarray) and groups.ndim != 1:
        raise BalanceError(f"groups has shape {groups.shape}: it must have one id for each sample.")
    ids = cast("list[Hashable]", groups.tolist() if isinstance(groups, np.ndarray) else list(groups))
    numbers: dict[Hashable, int] = {}
    try:
        return np.array([numbers.setdefault(group, len(numbers)) for group in ids], dtype=np.int64)
    except TypeError as error:
        raise BalanceError(f"groups holds an id that cannot be compared: {error}. Use numbers or strings.") from error
