"""Level packing of many items, a batch at a time: the result of `level_packing`'s loop, with arrays.

Items fall in cost, groups are sorted by load, the least loaded first. The loop gives the first item to the
first group, and goes on down the list as long as the next group's load is below that of every group that was
given an item since. So many items are placed at once; then the groups are sorted again. With as many groups as
a large run has ranks, a batch is a good part of all groups, and a handful of array operations place it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_balance.planner.sorting import stable_order

MIN_GROUPS = 40
"""With fewer groups batches are too short to pay for array operations."""

_CLOSED = -1
"""Room of a bin that holds an over-long item: closed to items of no weight as well."""


def batched_packing(
    costs: NDArray[np.int64],
    *,
    weights: NDArray[np.int64],
    group_costs: NDArray[np.int64],
    capacity: int,
    slack: NDArray[np.int64],
    loads: NDArray[np.int64],
) -> NDArray[np.int64] | None:
    """Gives each item to the least loaded group with room, there to the bin of most slack with room.

    Where a costlier item is lighter than one behind it in its batch, the batch goes to groups with room for both.

    Args:
        costs: `[num_items]` slack that each item takes, in the order to place them.
        weights: `[num_items]` room each item takes; those above `capacity` come first.
        group_costs: `[num_items]` positive, what an item adds to its group.
        capacity: room of a bin.
        slack: `[num_groups, bins_per_group]` target height of each bin, contiguous; overwritten.
        loads: `[num_groups]` to start from; overwritten.

    Returns:
        `[num_items]` bin of each item, `group * bins_per_group + bin`; None where an item found no room.
    """
    num_groups, bins_per_group = slack.shape
    room = np.full(slack.shape, capacity, dtype=np.int64)
    # One index in place of two: half the time of every look-up.
    flat_slack, flat_room = slack.reshape(-1), room.reshape(-1)
    most_room = np.full(num_groups, capacity, dtype=np.int64)
    num_over_long = int((weights > capacity).sum())
    needed = np.minimum(weights, capacity)
    no_slack = np.iinfo(np.int64).min
    positions = np.arange(num_groups, dtype=np.int64)
    bin_of = np.empty(costs.size, dtype=np.int64)
    start = 0
    while start < costs.size:
        # Over-long items are a batch of their own kind: they close their bins.
        stop = min(start + num_groups, num_over_long if start < num_over_long else costs.size)
        room_needed = needed[start:stop].max()
        has_room = most_room >= room_needed
        if has_room.all():
            groups = stable_order(loads)[: stop - start]
        else:
            open_groups = has_room.nonzero()[0]
            if not open_groups.size:
                stop, room_needed = start + 1, needed[start]
                open_groups = (most_room >= room_needed).nonzero()[0]
                if not open_groups.size:
                    return None
            else:
                # A group without room for the heaviest may have room for lighter ones: these begin the next batch.
                lighter = needed[start + 1 : stop] <= most_room[~has_room].max()
                if lighter.any():
                    stop = start + 1 + int(lighter.argmax())
            groups = open_groups[stable_order(loads[open_groups])][: stop - start]
        before, added = loads[groups], group_costs[start : start + groups.size]
        after = before + added
        overtaken = before[1:] >= np.minimum.accumulate(after)[:-1]
        count = int(overtaken.argmax()) + 1 if overtaken.any() else groups.size
        groups, items = groups[:count], slice(start, start + count)

        if bins_per_group > 1:
            rooms = room[groups]
            bins = np.where(rooms >= needed[items, None], slack[groups], no_slack).argmax(axis=1)
            flat_bins = groups * bins_per_group + bins
            left = _CLOSED if start < num_over_long else flat_room[flat_bins] - needed[items]
            rooms[positions[:count], bins] = left
            most_room[groups] = rooms.max(axis=1)
        else:
            flat_bins = groups
            left = _CLOSED if start < num_over_long else flat_room[flat_bins] - needed[items]
            most_room[groups] = left
        flat_slack[flat_bins] -= costs[items]
        flat_room[flat_bins] = left
        loads[groups] = after[:count]
        bin_of[items] = flat_bins
        start += count
    return bin_of
