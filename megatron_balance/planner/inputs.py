"""Turns the arguments of a caller into checked arrays: lengths, segments, images, home ranks, groups.

A sample may be made of several segments, documents packed into one sequence. Attention does not cross from one to the
next and each is padded by itself, so a sample's tokens and its cost are sums over segments.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError
from megatron_balance.topology import Topology

Ints = NDArray[np.int64]


def as_integers(values: Sequence[int] | NDArray[Any], *, name: str, bits: int = 40) -> Ints:
    """Non-negative integers as int64, `[num_samples]` → `[num_samples]`.

    Args:
        values: a sequence or an array of integers.
        name: of the argument, for messages.
        bits: entries are at most `2**bits`.

    Raises:
        BalanceError: an entry is negative, not an integer, or too large; names it.
    """
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise BalanceError(f"{name} is no list of integers: {error}.") from error
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


def as_num_segments(values: Sequence[int] | NDArray[Any], *, num_lengths: int) -> Ints:
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


def sum_segments(values: Ints, *, num_segments: Ints | None) -> Ints:
    """Sums over the segments of each sample, `[sum(num_segments)]` → `[num_samples]`; unchanged where None."""
    if num_segments is None:
        return values
    sums = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(values)])
    ends = np.cumsum(num_segments)
    return sums[ends] - sums[ends - num_segments]


def padded_at(lengths: Ints, *, num_segments: Ints | None, topology: Topology, sizes: Ints) -> Ints:
    """Padded tokens of every sample at a context-parallel size of its own, `[num_samples]` as `sizes`."""
    padded = np.zeros(sizes.size, dtype=np.int64)
    for size in np.unique(sizes).tolist():
        at_size = sum_segments(topology.at_cp_size(size).padded_seq_len(lengths), num_segments=num_segments)
        padded[sizes == size] = at_size[sizes == size]
    return padded


def as_home_ranks(values: Sequence[int] | NDArray[Any], *, num_samples: int, dp_size: int) -> Ints:
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


def number_groups(groups: Sequence[Hashable] | NDArray[Any]) -> Ints:
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
    numbers: dict[Hashable, int] = {}
    try:
        ids = cast("list[Hashable]", groups.tolist() if isinstance(groups, np.ndarray) else list(groups))
        return np.array([numbers.setdefault(group, len(numbers)) for group in ids], dtype=np.int64)
    except TypeError as error:
        raise BalanceError(f"groups holds an id that cannot be compared: {error}. Use numbers or strings.") from error


def groups_that_split(groups: Ints, *, ranks: Ints) -> Ints:
    """Groups with samples on more than one rank, ascending. Both are `[num_samples]`; groups count from 0."""
    rank_of = np.zeros(int(groups.max(initial=-1)) + 1, dtype=np.int64)
    rank_of[groups] = ranks
    return np.unique(groups[rank_of[groups] != ranks])


@dataclass(frozen=True, eq=False)
class Images:
    """The images of every sample: what the vision encoder runs for it, beside its tokens.

    The cost of an image is a polynomial of degree two in its patches, so two sums describe all images of a sample.

    Attributes:
        sums: `[num_samples, 2]` int64, the sum over a sample's images of their patches, and of their squared patches; 0
            for a sample without an image.
    """

    sums: Ints

    @classmethod
    def of(cls, image_patches: Sequence[Sequence[int]] | Images, *, num_samples: int) -> Images:
        """The images of samples.

        Args:
            image_patches: `[num_samples]`, for each sample the patches of each of its images; or their sums.
            num_samples: samples of the global batch.

        Raises:
            BalanceError: there is not one entry for each sample, or a number of patches is negative or no integer.
        """
        given = image_patches.sums if isinstance(image_patches, Images) else image_patches
        try:
            counts = [] if isinstance(image_patches, Images) else [len(of_sample) for of_sample in image_patches]
            num_given = len(given)
        except TypeError as error:
            raise BalanceError(f"image_patches is no list of lists: {error}. Give each sample's patches.") from error
        if num_given != num_samples:
            raise BalanceError(
                f"image_patches has {num_given} entries: it must have one for each of {num_samples} samples, "
                "empty where a sample has no image."
            )
        if isinstance(image_patches, Images):
            return image_patches
        flat = [num_patches for of_sample in image_patches for num_patches in of_sample]
        patches = as_integers(flat, name="image_patches", bits=30)  # so that squares fit in int64
        of_samples = np.array(counts, dtype=np.int64)
        return cls(np.stack([sum_segments(power, num_segments=of_samples) for power in (patches, patches**2)], axis=1))
