"""Level packing: bins of limited room, filled towards a target cost that each row of bins has.

Bins stand in groups, and in a group in rows. Bins of a row run at the same time, so that a row takes as
long as its costliest bin, and a group as long as its rows together. The algorithm is worst-fit
decreasing with two changes: bins start at the target height of their row (a row that must hold a large
item anyway may as well be full), and items go to the group that is least loaded.

    1. items: over-long ones (heavier than a bin) first, then by falling cost, then by index
    2. group = the least loaded one with a bin that has room
    3. bin = the one with most slack (target height minus cost) that has room
    4. bins without room for the item wait in a second heap, by room, and return once items are lighter
    5. an item that fits nowhere ends the attempt: the caller tries again with more rows

Heap entries are single integers, the key above the index: they compare faster than tuples, and ties go
to the lowest index. Where there are many bins or groups, `batched_packing.py` does the same with arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np
from numpy.typing import NDArray

from megatron_balance.planner.partition.batched_packing import MIN_GROUPS, batched_packing


def level_packing(
    costs: NDArray[np.int64],
    *,
    weights: NDArray[np.int64],
    capacity: int,
    target_heights: Sequence[int],
    num_groups: int,
    bins_per_row: int,
    group_costs: NDArray[np.int64] | None = None,
) -> NDArray[np.int64] | None:
    """Packs every item into one of `num_groups * len(target_heights) * bins_per_row` bins.

    Args:
        costs: `[num_items]` non-negative.
        weights: `[num_items]` room each item takes; one above `capacity` gets a bin of its own.
        capacity: room of a bin.
        target_heights: `[num_rows]` cost that the bins of a row are filled to.
        num_groups: groups of rows; their total costs are kept even.
        bins_per_row: bins of a group in each row.
        group_costs: `[num_items]` what an item adds to its group, where it is not `costs`.

    Returns:
        `[num_items]` bin of each item, `(group * num_rows + row) * bins_per_row + column`; None where
        an item found no room.
    """
    num_rows = len(target_heights)
    num_bins = num_groups * num_rows * bins_per_row
    over_long = weights > capacity
    order = np.lexsort((-weights, -costs, ~over_long))
    if max(num_groups, num_bins if num_groups == 1 else 0) >= MIN_GROUPS and costs.size >= 2 * num_bins:
        heights = np.repeat(np.array(target_heights, dtype=np.int64), bins_per_row)
        # In a single group the bins are all there is to choose from: least loaded is most slack.
        alone = num_groups == 1
        by_cost = costs if group_costs is None or alone else group_costs
        sorted_bins = batched_packing(
            costs[order],
            weights=weights[order],
            group_costs=np.maximum(by_cost[order], 1),
            capacity=capacity,
            slack=heights[:, None].copy() if alone else np.tile(heights, (num_groups, 1)),
            loads=heights.max() - heights if alone else np.zeros(num_groups, dtype=np.int64),
        )
        return None if sorted_bins is None else _unsorted(sorted_bins, order)

    bin_bits, group_bits = num_bins.bit_length(), num_groups.bit_length()
    bin_mask, group_mask = (1 << bin_bits) - 1, (1 << group_bits) - 1

    highest = max(target_heights)
    bins_by_slack: list[list[int]] = []
    for group in range(num_groups):
        first_bin = group * num_rows * bins_per_row
        bins_by_slack.append(
            [
                (highest - target_heights[index // bins_per_row] << bin_bits) | (first_bin + index)
                for index in range(num_rows * bins_per_row)
            ]
        )
        heapify(bins_by_slack[-1])
    bins_by_room: list[list[int]] = [[] for _ in range(num_groups)]
    key_of_bin: dict[int, int] = {}
    used = [0] * num_bins
    groups_by_load = list(range(num_groups))
    groups_by_room: list[int] = []
    key_of_group: dict[int, int] = {}

    sorted_weights = weights[order].tolist()
    sorted_costs = costs[order].tolist()
    sorted_group_costs = sorted_costs if group_costs is None else group_costs[order].tolist()
    bins: list[int] = []
    num_over_long = int(over_long.sum())

    for cost in sorted_group_costs[:num_over_long]:
        while groups_by_load and not bins_by_slack[groups_by_load[0] & group_mask]:
            heappop(groups_by_load)
        if not groups_by_load:
            return None
        group_key = groups_by_load[0]
        bins.append(heappop(bins_by_slack[group_key & group_mask]) & bin_mask)
        heapreplace(groups_by_load, group_key + (cost << group_bits))

    for cost, weight, group_cost in zip(
        sorted_costs[num_over_long:], sorted_weights[num_over_long:], sorted_group_costs[num_over_long:], strict=True
    ):
        most_used = capacity - weight
        while groups_by_room and groups_by_room[0] >> group_bits <= most_used:
            heappush(groups_by_load, key_of_group[heappop(groups_by_room) & group_mask])
        while groups_by_load:
            group_key = groups_by_load[0]
            group = group_key & group_mask
            by_slack, by_room = bins_by_slack[group], bins_by_room[group]
            while by_room and by_room[0] >> bin_bits <= most_used:
                heappush(by_slack, key_of_bin[heappop(by_room) & bin_mask])
            while by_slack and used[index := by_slack[0] & bin_mask] > most_used:
                key_of_bin[index] = heappop(by_slack)
                heappush(by_room, used[index] << bin_bits | index)
            if by_slack:
                key = by_slack[0]
                index = key & bin_mask
                used[index] += weight
                heapreplace(by_slack, key + (cost << bin_bits))
                heapreplace(groups_by_load, group_key + (group_cost << group_bits))
                bins.append(index)
                break
            heappop(groups_by_load)
            if by_room:
                key_of_group[group] = group_key
                heappush(groups_by_room, by_room[0] >> bin_bits << group_bits | group)
        else:
            return None

    return _unsorted(np.array(bins, dtype=np.int64), order)


def _unsorted(sorted_bins: NDArray[np.int64], order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Bins of items in the items' own order."""
    bin_of = np.empty(order.size, dtype=np.int64)
    bin_of[order] = sorted_bins
    return bin_of
