"""Largest differencing: number partitioning by always cancelling the two widest differences.

Source: N. Karmarkar and R. M. Karp, "The differencing method of set partitioning" (1982); the form for
more than two parts keeps with each partial solution the sums of all its parts.

    1. every item is a partial solution: one part holds it, the others are empty
    2. take the two partial solutions of widest difference (largest sum minus smallest)
    3. join them crosswise: the largest part of one with the smallest of the other, and so on
    4. repeat until one solution is left

With `equal_size` step 1 starts from rows: items are sorted and cut into rows of `num_parts`, one item a
part. Every join then keeps the counts equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError

_Part = tuple[int, int]
"""`(-sum of costs, node)`: a node below the number of items is that item, above it is a join of two nodes."""


def karmarkar_karp(
    costs: Sequence[int] | NDArray[np.int64], *, num_parts: int, equal_size: bool = False
) -> list[list[int]]:
    """Splits items into parts of nearly equal cost.

    Args:
        costs: `[num_items]` non-negative integers.
        num_parts: parts to make; some stay empty where there are fewer items.
        equal_size: every part gets the same number of items. Where `num_parts` does not divide the number
            of items, the parts differ by one at most.

    Returns:
        `[num_parts]` lists of item indices, ascending in each part; parts are ordered by falling cost,
        then by their first item.

    Raises:
        BalanceError: `num_parts` is below 1.

    Example:
        >>> karmarkar_karp([8, 7, 6, 5, 4], num_parts=2)
        [[1, 3, 4], [0, 2]]
    """
    if num_parts < 1:
        raise BalanceError(f"num_parts is {num_parts}: it must be at least 1.")
    values = [int(cost) for cost in costs]
    if not values:
        return [[] for _ in range(num_parts)]
    children: list[tuple[int, int]] = []

    # A partial solution lists its non-empty parts, largest first; the heap holds the widest on top.
    # Its serial number breaks ties, so that parts themselves are never compared.
    solutions = _rows(values, num_parts) if equal_size else [[(-value, item)] for item, value in enumerate(values)]
    heap = [(-_difference(parts, num_parts), serial, parts) for serial, parts in enumerate(solutions)]
    heapify(heap)
    serial = len(heap)
    while len(heap) > 1:
        widest = heappop(heap)[2]
        joined = _join(widest, heap[0][2], num_parts, len(values), children)
        heapreplace(heap, (-_difference(joined, num_parts), serial, joined))
        serial += 1

    parts = [(total, sorted(_items(node, len(values), children))) for total, node in heap[0][2]]
    parts.sort()
    return [items for _, items in parts] + [[] for _ in range(num_parts - len(parts))]


def _rows(values: list[int], num_parts: int) -> list[list[_Part]]:
    """Sorted items cut into rows of one item a part; the row of the smallest items may be short."""
    order = sorted(range(len(values)), key=lambda item: (-values[item], item))
    return [
        [(-values[item], item) for item in order[start : start + num_parts]]
        for start in range(0, len(order), num_parts)
    ]


def _difference(parts: list[_Part], num_parts: int) -> int:
    """Largest sum minus smallest; a part that is not listed is empty."""
    smallest = -parts[-1][0] if len(parts) == num_parts else 0
    return -parts[0][0] - smallest


def _join(
    one: list[_Part], other: list[_Part], num_parts: int, num_items: int, children: list[tuple[int, int]]
) -> list[_Part]:
    """Joins the largest parts of one solution with the smallest of the other."""
    overlap = len(one) + len(other) - num_parts
    if overlap <= 0:
        joined = one + other
    else:
        # Part i of `one` meets part num_parts-1-i of `other`; the first ones meet empty parts.
        first = len(one) - overlap
        joined = one[:first] + other[: len(other) - overlap]
        for (total, node), (other_total, other_node) in zip(one[first:], reversed(other), strict=False):
            joined.append((total + other_total, num_items + len(children)))
            children.append((node, other_node))
    joined.sort()
    return joined


def _items(node: int, num_items: int, children: list[tuple[int, int]]) -> list[int]:
    """The items below a node of the joins."""
    items: list[int] = []
    stack = [node]
    while stack:
        top = stack.pop()
        if top < num_items:
            items.append(top)
        else:
            stack.extend(children[top - num_items])
    return items


def karmarkar_karp_rows(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Deals rows of items to parts, one item of every row to each part, so that the parts cost the same.

    The equal-size form above for rows that are given, in many problems at once.

    Args:
        rows: `[num_problems, num_rows, num_parts]` costs, falling in each row.

    Returns:
        `[num_problems, num_rows, num_parts]` part of each item.
    """
    num_problems, num_rows, num_parts = rows.shape
    problems = np.arange(num_problems, dtype=np.int64)
    sums = rows.copy()
    differences = sums[:, :, 0] - sums[:, :, -1]
    # A partial solution's number: rows come first, then joins in their order. The lower one goes first among equals.
    serials = np.tile(np.arange(num_rows, dtype=np.int64), (num_problems, 1))
    # A join is (one, other, order): joined part p was part order[p] of `one` before sorting.
    joins: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.intp]]] = []

    def widest() -> NDArray[np.int64]:
        is_widest = differences == differences.max(axis=1, keepdims=True)
        return np.where(is_widest, serials, 2 * num_rows).argmin(axis=1)

    for step in range(num_rows - 1):
        one = widest()
        differences[problems, one] = -1
        other = widest()
        crossed = sums[problems, one] + sums[problems, other][:, ::-1]
        order = (-crossed).argsort(axis=1, kind="stable")
        joined = np.take_along_axis(crossed, order, axis=1)
        joins.append((serials[problems, one], serials[problems, other], order))
        sums[problems, other], differences[problems, other] = joined, joined[:, 0] - joined[:, -1]
        serials[problems, other] = num_rows + step

    # From the last join back to the rows: which part became which.
    part_of = np.empty((num_problems, 2 * num_rows - 1, num_parts), dtype=np.int64)
    part_of[:, -1] = np.arange(num_parts)
    for index in reversed(range(len(joins))):
        first, second, sorting = joins[index]
        crossed_part = np.empty((num_problems, num_parts), dtype=np.int64)
        np.put_along_axis(crossed_part, sorting, part_of[:, num_rows + index], axis=1)
        part_of[problems, first], part_of[problems, second] = crossed_part, crossed_part[:, ::-1]
    return part_of[:, :num_rows]
