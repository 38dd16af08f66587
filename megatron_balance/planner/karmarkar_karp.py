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
