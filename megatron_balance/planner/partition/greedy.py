"""Longest processing time first: the largest item goes to the lightest part.

Source: R. L. Graham, "Bounds on multiprocessing timing anomalies" (1969). With a free count the largest
part is at most 4/3 of the best possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heapreplace

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError


def greedy(
    costs: Sequence[int] | NDArray[np.int64], *, num_parts: int, max_count: int | None = None
) -> list[list[int]]:
    """Splits items into parts of nearly equal cost.

    Args:
        costs: `[num_items]` non-negative integers.
        num_parts: parts to make.
        max_count: items a part holds at most; None for any number.

    Returns:
        `[num_parts]` lists of item indices, ascending in each part.

    Raises:
        BalanceError: `num_parts` is below 1, or `num_parts * max_count` items are fewer than there are.

    Example:
        >>> greedy([8, 7, 6, 5, 4], num_parts=2)
        [[0, 3, 4], [1, 2]]
    """
    if num_parts < 1:
        raise BalanceError(f"num_parts is {num_parts}: it must be at least 1.")
    values = [int(cost) for cost in costs]
    if max_count is not None and num_parts * max_count < len(values):
        raise BalanceError(f"max_count is {max_count}: {num_parts} parts cannot hold {len(values)} items.")

    parts: list[list[int]] = [[] for _ in range(num_parts)]
    # The count comes second, so that items that cost nothing are spread as well.
    lightest = [(0, 0, part) for part in range(num_parts)]
    for item in sorted(range(len(values)), key=lambda item: (-values[item], item)):
        total, count, part = lightest[0]
        parts[part].append(item)
        if max_count is not None and count + 1 == max_count:
            heappop(lightest)
        else:
            heapreplace(lightest, (total + values[item], count + 1, part))
    return [sorted(items) for items in parts]
