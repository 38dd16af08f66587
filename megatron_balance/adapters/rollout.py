"""One rollout batch cut into optimiser steps, no group of samples split.

Groups are taken in the order of their first sample, and each step gets the next ones. Samples of a group
need not stand together: they follow its first. Where boundaries are given, each stretch between two of
them is cut separately, so that no sample crosses one.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError
from megatron_balance.planner import as_integers, number_groups


@dataclass(frozen=True, eq=False)
class RolloutSplit:
    """Optimiser steps of one rollout batch.

    Attributes:
        steps: for every step `[num_samples_of_step]` int64 sample ids, ascending: positions in the rollout batch.
        dropped: `[num_dropped]` int64 ids in no step, ascending.
        num_groups: groups of every step.
    """

    steps: tuple[NDArray[np.int64], ...]
    dropped: NDArray[np.int64]
    num_groups: tuple[int, ...]


def split_rollout(
    groups: Sequence[Hashable] | NDArray[Any],
    *,
    num_steps: int | None = None,
    global_batch_size: int | None = None,
    boundaries: Sequence[int] | NDArray[Any] = (),
    drop_last: bool = False,
) -> RolloutSplit:
    """Cuts a rollout batch into steps, each of whole groups; `build_data_schedule` then plans every step.

    Args:
        groups: `[num_samples]` id of the group of each sample: its prompt or rollout.
        num_steps: steps of each stretch, even in groups: they differ by one at most, the first ones have more.
        global_batch_size: groups of a step, in place of `num_steps`.
        boundaries: ascending positions that no sample crosses: those before one go to earlier steps than
            those from it on.
        drop_last: leave out the groups at the end of a stretch that do not fill a step, so that all steps of
            the stretch have the same number of groups.

    Returns:
        RolloutSplit: the same for the same ids in the same order.

    Raises:
        BalanceError: neither or both of `num_steps` and `global_batch_size` are given, there are fewer groups
            than steps, or a group has samples on both sides of a boundary.

    Example:
        >>> split = split_rollout(["a", "b", "a", "c", "d"], num_steps=2)
        >>> [step.tolist() for step in split.steps]
        [[0, 1, 2], [3, 4]]
    """
    if (num_steps is None) == (global_batch_size is None):
        raise BalanceError("split_rollout takes either num_steps or global_batch_size, not both, not neither.")
    name, count = ("num_steps", num_steps) if num_steps is not None else ("global_batch_size", global_batch_size)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise BalanceError(f"{name} is {count!r}: it must be an integer of at least 1.")
    numbers = number_groups(groups)

    steps: list[NDArray[np.int64]] = []
    dropped: list[NDArray[np.int64]] = []
    num_groups: list[int] = []
    for start, stop in _stretches(boundaries, groups=numbers):
        # Groups of a stretch are numbered without gaps: their first samples follow one another.
        local = numbers[start:stop] - int(numbers[start:stop].min(initial=numbers.size))
        total = int(local.max(initial=-1)) + 1
        if num_steps is not None:
            ends = _even_ends(total, num_steps=num_steps, drop_last=drop_last)
        else:
            assert global_batch_size is not None
            ends = list(range(global_batch_size, total + 1, global_batch_size))
            if not drop_last and total % global_batch_size:
                ends.append(total)
        for first, last in zip([0, *ends], ends, strict=False):
            steps.append(start + np.flatnonzero((local >= first) & (local < last)))
            num_groups.append(last - first)
        dropped.append(start + np.flatnonzero(local >= (ends[-1] if ends else 0)))
    return RolloutSplit(steps=tuple(steps), dropped=np.concatenate(dropped), num_groups=tuple(num_groups))


def _stretches(boundaries: Sequence[int] | NDArray[Any], *, groups: NDArray[np.int64]) -> list[tuple[int, int]]:
    """`(start, stop)` of each stretch between boundaries; raises where a group crosses one."""
    inner = as_integers(boundaries, name="boundaries").tolist()
    edges = [0, *(edge for edge in inner if 0 < edge < groups.size), groups.size]
    wrong = sorted(inner) != inner or (bool(inner) and inner[-1] > groups.size)
    if wrong:
        raise BalanceError(f"boundaries are {inner}: they must ascend from 0 to the {groups.size} samples.")
    most_so_far = np.maximum.accumulate(groups) if groups.size else groups
    for edge in edges[1:-1]:
        # A group that started before the boundary has a number no higher than the highest seen there.
        crossing = np.flatnonzero(groups[edge:] <= most_so_far[edge - 1])
        if crossing.size:
            raise BalanceError(
                f"sample {edge + int(crossing[0])} belongs to a group that starts before the boundary {edge}: "
                "move the boundary, or give the sample a group of its own."
            )
    return [(start, stop) for start, stop in zip(edges, edges[1:], strict=False) if stop > start or groups.size == 0]


def _even_ends(num_groups: int, *, num_steps: int, drop_last: bool) -> list[int]:
    """The end of each step, in groups."""
    if num_groups == 0:
        return []
    if num_steps > num_groups:
        raise BalanceError(f"num_steps is {num_steps}: {num_groups} groups do not fill as many steps.")
    each, more = divmod(num_groups, num_steps)
    if drop_last:
        more = 0
    return [step * each + min(step, more) for step in range(1, num_steps + 1)]
