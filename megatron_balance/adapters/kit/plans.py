"""Plans that several hosts ask for: the steps of a rollout batch, and samples on ranks. Integers, ties by index."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cost.model import MAX_TOTAL_COST, CostModel
from megatron_balance.errors import BalanceError, check_integer
from megatron_balance.planner import number_groups, partition_items

Ints = NDArray[np.int64]


def split_rollout(groups: Sequence[Hashable] | NDArray[Any], *, global_batch_size: int) -> list[Ints]:
    """Cuts a rollout batch into steps of whole groups, taken in the order of their first samples.

    Args:
        groups: `[num_samples]` id of the group of each sample, its prompt or rollout; a group need not stand together.
        global_batch_size: groups of a step; the last step may have fewer.

    Returns:
        For every step `[num_samples_of_step]` int64 positions in the rollout batch, ascending.

    Raises:
        BalanceError: `global_batch_size` is not a positive integer.

    Examples:
        >>> [step.tolist() for step in split_rollout(["a", "b", "a", "c", "d"], global_batch_size=2)]
        [[0, 1, 2], [3, 4]]
    """
    step_of = number_groups(groups) // check_integer("global_batch_size", global_batch_size)
    return [np.flatnonzero(step_of == step) for step in range(int(step_of.max(initial=-1)) + 1)]


def sample_costs(lengths: Ints, *, cost_model: CostModel) -> Ints:
    """Cost of samples, int64 of the lengths' shape.

    The unit is the cost of one squared token (of one token where there is no attention) and depends on the model alone,
    so that numbers of two calls can be added and compared. A sample that costs anything costs at least 1.
    """
    unit = cost_model.quadratic or sum(coefficient for _, coefficient in cost_model.windows) or cost_model.linear or 1
    unique, inverse = np.unique(lengths, return_inverse=True)
    # Python integers: FLOPs of a long sample of a large model approach the limit of int64.
    costs = cost_model.total_cost(unique.astype(np.int64)).tolist()
    in_units = [max((2 * cost + unit) // (2 * unit), 1) if cost else 0 for cost in costs]
    return np.array(in_units, dtype=np.int64)[inverse.reshape(lengths.shape)]


def even_parts(costs: Sequence[int] | Ints, *, num_parts: int, equal_count: bool) -> list[Ints]:
    """Cuts items into parts of nearly equal cost.

    Args:
        costs: `[num_items]` non-negative integers, of any size.
        num_parts: parts to make, 1 to `num_items`.
        equal_count: every part holds the same number of items, or the quotient rounded up at most.

    Returns:
        `[num_parts]` ascending int64 indices, none empty; with `equal_count` larger parts first.

    Raises:
        BalanceError: there are fewer items than parts.
    """
    values = costs.tolist() if isinstance(costs, np.ndarray) else list(costs)
    if not 1 <= num_parts <= len(values):
        raise BalanceError(f"the number of parts is {num_parts}: it must be from 1 to the {len(values)} items.")
    # Divided by one power of two where the sum would leave int64.
    shift = max(0, sum(values).bit_length() - (MAX_TOTAL_COST.bit_length() - 2))
    scaled = np.array([max(value >> shift, 1) if value else 0 for value in values], dtype=np.int64)
    part_of = partition_items(scaled, num_parts=num_parts, equal_count=equal_count)
    parts = [np.flatnonzero(part_of == part) for part in range(num_parts)]
    return sorted(parts, key=lambda items: -items.size) if equal_count else parts
