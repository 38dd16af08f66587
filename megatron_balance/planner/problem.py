"""A planning problem: a caller's lengths, segments, images, home ranks and groups, checked and made arrays.

A sample may be made of several segments, documents packed into one sequence. Attention does not cross from one to the
next and each is padded by itself, so a sample's tokens and its cost are sums over segments.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.planner.objective import Ints, resolve_objective
from megatron_balance.topology import Limits, Topology

if TYPE_CHECKING:
    from megatron_balance.planner.forest import Forest

INT_MAX = int(np.iinfo(np.int64).max)


def as_integers(values: Sequence[int] | NDArray[Any], *, name: str, bits: int = 40) -> Ints:
    """Integers from 0 to `2**bits` as int64; a BalanceError names the argument and the wrong entry."""
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise BalanceError(f"{name} is not a list of integers: {error}.") from error
    if array.ndim != 1:
        raise BalanceError(f"{name} has shape {array.shape}: it must have one entry for each sample.")
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if array.dtype.kind not in "iu" or (not isinstance(values, np.ndarray) and bool in set(map(type, values))):
        for index, value in enumerate(cast("Sequence[object]", values)):
            if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
                raise BalanceError(f"{name}[{index}] is {value!r}: it must be an integer of at least 0.")
    invalid = np.flatnonzero((array < 0) | (array > 2**bits))
    if invalid.size:
        index = int(invalid[0])
        raise BalanceError(f"{name}[{index}] is {array[index]}: it must be an integer from 0 to 2**{bits}.")
    return array.astype(np.int64)


def sum_segments(values: Ints, *, num_segments: Ints | None) -> Ints:
    """Sums over the segments of each sample, `[…, sum(num_segments)]` → `[…, num_samples]`; unchanged where None."""
    if num_segments is None:
        return values
    sums = np.concatenate([np.zeros((*values.shape[:-1], 1), dtype=np.int64), np.cumsum(values, axis=-1)], axis=-1)
    ends = np.cumsum(num_segments)
    return sums[..., ends] - sums[..., ends - num_segments]


def number_groups(groups: Sequence[Hashable] | NDArray[Any], *, name: str = "groups", count: int | None = None) -> Ints:
    """Groups numbered from 0 by their first sample, so that any id will do: a number, a string, a uuid.

    `count`: samples that there must be an id for.
    """
    if isinstance(groups, np.ndarray) and groups.ndim != 1:
        raise BalanceError(f"{name} has shape {groups.shape}: it must have one id for each sample.")
    numbers: dict[Hashable, int] = {}
    try:
        ids = cast("list[Hashable]", groups.tolist() if isinstance(groups, np.ndarray) else list(groups))
        group_of = np.array([numbers.setdefault(group, len(numbers)) for group in ids], dtype=np.int64)
    except TypeError as error:
        raise BalanceError(f"{name} holds an id that cannot be compared: {error}. Use numbers or strings.") from error
    check_count(name, len(ids), count=len(ids) if count is None else count)
    return group_of


def groups_that_split(groups: Ints, *, ranks: Ints) -> Ints:
    """Groups with samples on more than one rank, ascending. Both are `[num_samples]`; groups count from 0."""
    rank_of = np.zeros(int(groups.max(initial=-1)) + 1, dtype=np.int64)
    rank_of[groups] = ranks
    return np.unique(groups[rank_of[groups] != ranks])


def sum_images(image_patches: Sequence[Sequence[int]] | Ints, *, num_samples: int) -> Ints:
    """`[num_samples, 2]` the sums, over the images of each sample, of their patches and of their squared patches.

    The cost of an image is a polynomial of degree two in its patches, so these describe all images of a sample.
    `image_patches`: for each sample the patches of each of its images, or these sums.
    """
    try:
        counts = np.array([len(patches_of) for patches_of in image_patches], dtype=np.int64)
    except TypeError as error:
        raise BalanceError(f"image_patches is no list of lists: {error}. Give each sample's patches.") from error
    check_count("image_patches", counts.size, count=num_samples)
    if isinstance(image_patches, np.ndarray):
        return image_patches
    flat = [num_patches for patches_of in image_patches for num_patches in patches_of]
    patches = as_integers(flat, name="image_patches", bits=24)  # so that sums of squares fit in int64
    return np.stack([sum_segments(power, num_segments=counts) for power in (patches, patches**2)], axis=1)


@dataclass(frozen=True, eq=False, kw_only=True)
class Problem:
    """A global batch, the ranks that run it, and how its plans are judged: attributes as of DataSchedule."""

    lengths: Ints
    cost_model: CostModel
    topology: Topology
    limits: Limits
    objective: str
    num_segments: Ints | None = None
    segment_lengths: Ints | None = None
    images: Ints | None = None  # as `sum_images` returns
    home_ranks: Ints | None = None
    forest: Forest | None = None

    @classmethod
    def of(
        cls,
        lengths: Sequence[int] | NDArray[Any],
        *,
        cost_model: CostModel,
        topology: Topology,
        limits: Limits,
        objective: str = "auto",
        num_segments: Sequence[int] | NDArray[Any] | None = None,
        image_patches: Sequence[Sequence[int]] | Ints | None = None,
        home_ranks: Sequence[int] | NDArray[Any] | None = None,
        forest: Forest | None = None,
    ) -> Problem:
        """The arguments of `build_data_schedule` that other functions share; a BalanceError names a wrong one."""
        check_kind("cost_model", cost_model, CostModel)
        check_kind("topology", topology, Topology)
        check_kind("limits", limits, Limits)
        objective = resolve_objective(objective, topology=topology)
        segments = as_integers(lengths, name="lengths")
        counts = None if num_segments is None else as_integers(num_segments, name="num_segments")
        if counts is not None and int(counts.sum()) != segments.size:
            raise BalanceError(
                f"num_segments sums to {int(counts.sum())}: with it, lengths holds the length of every segment, "
                f"and it holds {segments.size}."
            )
        original = sum_segments(segments, num_segments=counts)
        homes = None if home_ranks is None else as_integers(home_ranks, name="home_ranks")
        if homes is not None:
            check_count("home_ranks", homes.size, count=original.size)
            if int(homes.max(initial=0)) >= topology.dp_size:
                raise BalanceError(
                    f"home_ranks[{homes.argmax()}] is {homes.max()}: it must be below dp_size {topology.dp_size}."
                )
        if forest is not None and not np.array_equal(forest.lengths, original):
            raise BalanceError("forest has other lengths than lengths: make it of these samples, in their order.")
        return cls(
            lengths=original,
            cost_model=cost_model,
            topology=topology,
            limits=limits,
            objective=objective,
            num_segments=counts,
            segment_lengths=None if counts is None else segments,
            images=None if image_patches is None else sum_images(image_patches, num_samples=original.size),
            home_ranks=homes,
            forest=forest,
        )

    def of_sets(self, set_of: Ints) -> Problem:
        """The problem whose samples are sets of these, a segment each, without homes."""
        sizes = np.bincount(set_of)
        segments = self.lengths[np.argsort(set_of, kind="stable")]
        return replace(
            self,
            lengths=sum_segments(segments, num_segments=sizes),
            num_segments=sizes,
            segment_lengths=segments,
            home_ranks=None,
        )

    @property
    def segments(self) -> Ints:
        """`[sum(num_segments)]` original tokens of every segment."""
        return self.lengths if self.segment_lengths is None else self.segment_lengths

    def padded(self, sizes: Ints) -> Ints:
        """Padded tokens of every sample at a context-parallel size of its own, `[num_samples]` as `sizes`."""
        padded = np.zeros_like(sizes)
        for size in np.unique(sizes).tolist():
            segment_tokens = self.topology.with_cp_size(size).padded_seq_len(self.segments)
            at_size = sum_segments(segment_tokens, num_segments=self.num_segments)
            padded[sizes == size] = at_size[sizes == size]
        return padded


def check_count(name: str, size: int, *, count: int) -> None:
    """Raises BalanceError if an argument has not one entry for each of `count` samples."""
    if size != count:
        raise BalanceError(f"{name} has {size} entries: it must have one for each of {count} samples.")


def check_kind(name: str, value: object, kind: type[object]) -> None:
    """Raises BalanceError if an argument is of another type."""
    if not isinstance(value, kind):
        raise BalanceError(f"{name} is {value!r}: it must be a {kind.__name__}.")


def sums(values: Ints, index: Ints, size: int) -> Ints:
    """`[size]` sums of the values of each index."""
    out = np.zeros(size, dtype=np.int64)
    np.add.at(out, index, values)
    return out
