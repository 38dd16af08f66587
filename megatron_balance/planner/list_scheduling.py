"""The loops that give items to bins, the costliest first: all of the planner's, in arrays.

Costs descend. `slack` is the cost that a bin may still take, `room` the weight: both are overwritten.
"""

from __future__ import annotations

import numpy as np

from megatron_balance.planner.problem import INT_MAX, Ints


def assign_lpt(
    costs: Ints,
    weights: Ints,
    *,
    slack: Ints,
    room: Ints,
    loads: Ints,
    added: Ints,
    within: bool = False,
    stops: bool = False,
) -> Ints:
    """Longest processing time first: each item to the least loaded group with room, there to the bin with most slack.

    (R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969.) Items are assigned in runs that end where a loop
    would return to a group. An item takes its cost, which descends, of a bin's slack and its weight of the room, both
    `[num_groups, num_bins]`, and adds to the load of its group: all three are overwritten. With `within` no bin exceeds
    its slack; groups then have one bin, and `loads` is its negative slack. `stops`: at the first item without room.
    Returns `group * num_bins + bin`, -1 without room.
    """
    num_bins = slack.shape[1]
    flat_slack, flat_room, largest = slack.reshape(-1), room.reshape(-1), room.max(axis=1)
    bin_of, start = np.full(costs.size, -1, dtype=np.int64), 0
    while start < costs.size:
        able = np.flatnonzero(largest >= weights[start])
        if within:
            able = able[flat_slack[able] >= costs[start]]
        if not able.size:
            if stops:
                break
            start += 1
            continue
        groups = able[np.argsort(loads[able], kind="stable")][: costs.size - start]
        weight = weights[start : start + groups.size]
        after = loads[groups] + added[start : start + groups.size]
        ends = loads[groups[1:]] >= np.minimum.accumulate(after)[:-1]
        ends |= largest[groups[1:]] < weight[1:]
        if within:
            ends |= flat_slack[groups[1:]] < costs[start + 1 : start + groups.size]
        count = int(ends.argmax()) + 1 if ends.any() else groups.size
        groups, weight, items = groups[:count], weight[:count], slice(start, start + count)
        bins = groups
        if num_bins > 1:
            best = np.where(room[groups] >= weight[:, None], slack[groups], -INT_MAX).argmax(axis=1)
            bins = groups * num_bins + best
        flat_slack[bins] -= costs[items]
        flat_room[bins] -= weight
        largest[groups] = room[groups].max(axis=1) if num_bins > 1 else flat_room[bins]
        loads[groups] = after[:count]
        bin_of[items] = bins
        start += count
    return bin_of


def fill_capped(costs: Ints, weights: Ints, *, slack: Ints, room: Ints) -> Ints:
    """In turns each bin gets the costliest item that fits, all bins at once; -1 for items that fit nowhere.

    Costs descend. `slack` and `room`, `[num_bins]`, are what a bin holds at most; both are overwritten.
    """
    bin_of = np.full(costs.size, -1, dtype=np.int64)
    free, bins = np.arange(costs.size), np.arange(slack.size)
    # From the first item that neither costs nor, with all behind it, weighs too much.
    heaviest = np.maximum.accumulate(weights[::-1])[::-1]
    while free.size and bins.size:
        first = np.maximum((-costs[free]).searchsorted(-slack[bins]), (-heaviest[free]).searchsorted(-room[bins]))
        order, steps = first.argsort(kind="stable"), np.arange(bins.size)
        chosen = np.maximum.accumulate(first[order] - steps) + steps  # no two bins get the same item
        chosen = chosen[chosen < free.size]
        bins, items = bins[order[: chosen.size]], free[chosen]
        bin_of[items] = bins
        slack[bins] -= costs[items]
        room[bins] -= weights[items]
        free = np.delete(free, chosen)
    return bin_of


def assign_in_groups(costs: Ints, weights: Ints, *, group_of: Ints, slack: Ints, room: Ints) -> Ints:
    """Gives each item of every group to the group's bin with most slack that has room, all groups at once.

    Items come group by group, in the order in which they are placed. `slack` and `room`, `[num_groups, num_bins]`, are
    overwritten. Returns the bin within the group, -1 where an item finds no room.
    """
    bins = np.full(costs.size, -1, dtype=np.int64)
    position = np.arange(costs.size) - group_of.searchsorted(group_of)
    ends = np.cumsum(np.bincount(position)).tolist()
    by_position = np.argsort(position, kind="stable")
    for start, end in zip([0, *ends], ends, strict=False):
        items = by_position[start:end]
        group = group_of[items]
        fits = room[group] >= weights[items, None]
        found = fits.any(axis=1)
        items, group, fits = items[found], group[found], fits[found]
        best = np.where(fits, slack[group], np.iinfo(np.int64).min).argmax(axis=1)
        slack[group, best] -= costs[items]
        room[group, best] -= weights[items]
        bins[items] = best
    return bins


def fill_empty_bins(bin_of: Ints, num_bins: int) -> Ints:
    """The cheapest samples that share a bin move to empty bins: a dummy costs its `per_microbatch` for nothing."""
    empty = np.flatnonzero(np.bincount(bin_of, minlength=num_bins) == 0)
    if not empty.size:
        return bin_of
    first = np.zeros(num_bins, dtype=np.int64)
    first[bin_of[::-1]] = np.arange(bin_of.size)[::-1]  # samples are sorted: the costliest of each bin, which stays
    movable = np.flatnonzero(first[bin_of] != np.arange(bin_of.size))[::-1][: empty.size]
    bin_of = bin_of.copy()
    bin_of[movable] = empty[: movable.size]
    return bin_of
