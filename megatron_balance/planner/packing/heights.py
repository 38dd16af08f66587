"""How high each row of micro-batches should be filled, so that groups of ranks that meet end together.

A group of e ranks runs M rows of e micro-batches one after another. Large samples that cannot share a
micro-batch force some rows to be high. A group with a high row must have lower rows besides, so that the
sum of its rows is that of the others.

    1. forced heights go to groups as in the greedy method: the highest to the group of least forced height
    2. what the forced rows cannot hold is poured over the other rows, group by group like water in
       vessels that stand on their forced heights

A pipeline of one group may want its rows steep: what is poured then falls from row to row.
"""

from __future__ import annotations

import numpy as np

from megatron_balance.planner.bounds.time import SlotFloor, slot_floor
from megatron_balance.planner.packing.expert_group_heights import slim_heights
from megatron_balance.planner.partition import greedy
from megatron_balance.planner.problem import Problem


def target_heights(
    problem: Problem,
    *,
    num_microbatches: int,
    sync_span: int,
    way: str,
    lowered: list[int] | None = None,
    steepness: int = 0,
) -> list[int]:
    """Target cost of every micro-batch.

    Args:
        problem: the global batch.
        num_microbatches: rows of a group.
        sync_span: ranks of a group.
        way: with several groups, which forced rows take from the other rows of their group: `rows`, those that
            the lower bound takes as forced; `apart`, every row that is forced above the even height; `slim`,
            the same, and the row's other micro-batches are filled no more than their shared work allows.
        lowered: `[num_groups]` cost to take off each group's rows together, below zero to add; None for none.
        steepness: with one group, the highest row that is not forced is `1 + steepness` times the lowest; 0: even.

    Returns:
        `[num_groups * num_microbatches * sync_span]` costs, group by group and row by row, the high rows of a
        group first.
    """
    num_groups = problem.topology.dp_size // sync_span
    floor = slot_floor(problem, sync_span=sync_span)
    if num_groups == 1:
        # Whole numbers that fall in even steps, each in the middle of its own.
        last = 2 * num_microbatches - 1
        profile = [2 * num_microbatches + steepness * (last - 2 * row) for row in range(num_microbatches)]
        rows = _rows_of_one_group(problem, floor, profile=profile, sync_span=sync_span)
    elif way == "slim":
        heights = slim_heights(problem, num_microbatches=num_microbatches, sync_span=sync_span)
        return heights if lowered is None else _lower(heights, by_cost=lowered, sync_span=sync_span)
    else:
        rows = _rows_of_groups(
            floor, num_groups=num_groups, num_rows=num_microbatches, sync_span=sync_span, apart=way == "apart"
        )
    heights = [height for height in rows for _ in range(sync_span)]
    return heights if lowered is None else _lower(heights, by_cost=lowered, sync_span=sync_span)


def _lower(heights: list[int], *, by_cost: list[int], sync_span: int) -> list[int]:
    """Takes a cost off each group's lowest rows, evenly: high rows are as high as their large samples."""
    of_groups = np.array(heights, dtype=np.int64).reshape(len(by_cost), -1)
    lowest = of_groups == of_groups.min(axis=1, keepdims=True)
    # A group of high rows alone has single micro-batches that are lowest: there, all of them.
    lowest |= lowest.sum(axis=1, keepdims=True) < sync_span
    num_rows = lowest.sum(axis=1) // sync_span
    taken = np.where(lowest, (np.array(by_cost, dtype=np.int64) // num_rows)[:, None], 0)
    return np.maximum(of_groups - taken, 0).reshape(-1).tolist()


def _rows_of_one_group(problem: Problem, floor: SlotFloor, *, profile: list[int], sync_span: int) -> list[int]:
    """Forced rows at the front, as many as stand above what they cannot hold, which is spread by the profile.

    Args:
        problem: the global batch.
        floor: forced heights.
        profile: `[num_rows]` shares of the rows, from the highest.
        sync_span: ranks of the group.
    """
    total, num_rows = int(problem.costs.sum()), len(profile)
    high: list[int] = []
    spread: list[int] = []
    for num_high in range(num_rows + 1):
        most_held = floor.held_costs[num_high] if num_high < len(floor.held_costs) else total
        behind = total - min(most_held, sync_span * sum(high))
        shares = sync_span * sum(profile[num_high:])
        spread = [-(-behind * share // shares) for share in profile[num_high:]]
        highest = spread[0] if spread else 0
        if num_high >= len(floor.forced_heights) or floor.forced_heights[num_high] <= highest:
            break
        high.append(floor.forced_heights[num_high])
    high = high[:num_rows]
    return high + spread[: num_rows - len(high)]


def _rows_of_groups(floor: SlotFloor, *, num_groups: int, num_rows: int, sync_span: int, apart: bool) -> list[int]:
    """Forced rows dealt to the groups, the rest poured over the groups' other rows."""
    num_all = num_groups * num_rows
    forced = floor.forced_heights[:num_all]
    num_high = _num_high(floor, num_rows=num_all, sync_span=sync_span) if apart else floor.num_high
    high = forced[:num_high]
    spread_cost = _spread_cost(floor, num_high)
    high_of = greedy(high, num_parts=num_groups, max_count=num_rows)
    bases = [sum(high[row] for row in rows) for rows in high_of]
    open_rows = [num_rows - len(rows) for rows in high_of]
    level = _water_level(bases, open_rows=open_rows, volume=-(-spread_cost // sync_span))
    heights: list[int] = []
    for rows, base, num_open in zip(high_of, bases, open_rows, strict=True):
        even = max(0, -(-(level - base) // num_open)) if num_open else 0
        heights += [high[row] for row in rows] + [even] * num_open
    # Forced heights that the even ones do not cover: the samples exist and must stand somewhere.
    lower = sorted(
        (row for row in range(num_all) if row % num_rows >= len(high_of[row // num_rows])),
        key=lambda row: (-heights[row], row),
    )
    for row, height in zip(lower, forced[len(high) :], strict=False):
        heights[row] = max(heights[row], height)
    return heights


def _spread_cost(floor: SlotFloor, num_high: int) -> int:
    """Cost that the first `num_high` slots cannot hold."""
    return floor.spread_cost + floor.held_costs[floor.num_high] - floor.held_costs[num_high]


def _num_high(floor: SlotFloor, *, num_rows: int, sync_span: int) -> int:
    """Rows whose forced height is above the even height of the rows behind them."""
    for num_high, height in enumerate(floor.forced_heights[:num_rows]):
        if height * (num_rows - num_high) * sync_span <= _spread_cost(floor, num_high):
            return num_high
    return min(len(floor.forced_heights), num_rows)


def _water_level(bases: list[int], *, open_rows: list[int], volume: int) -> int:
    """Level to which `volume` rises over vessels that stand on `bases`; those with no open row take none."""
    vessels = sorted(base for base, num_open in zip(bases, open_rows, strict=True) if num_open)
    level = vessels[0] if vessels else 0
    for width, base in enumerate(vessels[1:], start=1):
        step = (base - level) * width
        if step >= volume:
            return level - (-volume // width)
        volume -= step
        level = base
    return level - (-volume // max(len(vessels), 1))
