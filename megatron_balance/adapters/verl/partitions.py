"""Rows to ranks where verl asks for a bare partition: workloads in, lists of indices out.

The partitioning is the planner's: `partition_items` takes the better of largest differencing and largest first, and
refines it. Here every row, or every group of rows that share a uid, is one of its groups.

Invariants: every index occurs once; with `equal_size` parts hold the same number, or one of two neighbouring sizes
or less where the number of parts does not divide (62 rows over 4 ranks: at most 16 each); no part is empty.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.adapters.verl.workload import workloads
from megatron_balance.cost.model import MAX_TOTAL_COST, CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.planner.grouping import partition_items
from megatron_balance.planner.inputs import number_groups


def balanced_partitions(
    loads: Sequence[int] | NDArray[np.int64], *, num_parts: int, equal_size: bool
) -> list[list[int]]:
    """What stands in place of verl's `get_seqlen_balanced_partitions`.

    Args:
        loads: `[num_items]` non-negative whole numbers: a list, an array or a tensor (of floats as well).
        num_parts: parts to make.
        equal_size: every part holds the same number of items, as near as that goes.

    Returns:
        `[num_parts]` lists of indices, ascending; larger parts first where they differ in number.

    Raises:
        BalanceError: there are fewer items than parts, or a load is negative or a fraction.
    """
    values = _whole_numbers(loads)
    if not 1 <= num_parts <= len(values):
        raise BalanceError(f"k_partitions is {num_parts}: it must be from 1 to the {len(values)} items.")
    # A power of two off, the same everywhere, where the sum would leave int64.
    shift = max(0, sum(values).bit_length() - (MAX_TOTAL_COST.bit_length() - 2))
    costs = np.array([max(value >> shift, 1) if value else 0 for value in values], dtype=np.int64)
    part_of = partition_items(costs, num_parts=num_parts, equal_count=equal_size)
    parts = [np.flatnonzero(part_of == part).tolist() for part in range(num_parts)]
    return sorted(parts, key=lambda items: -len(items)) if equal_size else parts


def group_balanced_partitions(
    lengths: NDArray[np.int64], *, uids: Sequence[Hashable] | NDArray[Any], num_parts: int, cost_model: CostModel
) -> list[list[int]]:
    """What stands in place of verl's `get_group_balanced_partitions`: rows of one uid stay together.

    Args:
        lengths: `[num_rows]` tokens.
        uids: `[num_rows]` id of the group of each row; rows of a group need not be neighbours.
        num_parts: parts to make.
        cost_model: what a row costs.

    Returns:
        `[num_parts]` lists of row indices: group after group in the order of their first rows, so that the rows of
        a group are neighbours.

    Raises:
        BalanceError: there are fewer groups than parts, or not one uid a row.
    """
    groups = number_groups(uids)
    if groups.size != lengths.size:
        raise BalanceError(f"there are {groups.size} uids for {lengths.size} rows: there must be one each.")
    num_groups = int(groups.max(initial=-1)) + 1
    if num_groups < num_parts:
        raise BalanceError(
            f"{num_groups} groups of rows cannot be kept whole on {num_parts} ranks: raise train_batch_size."
        )
    loads = np.zeros(num_groups, dtype=np.int64)
    np.add.at(loads, groups, workloads(lengths, cost_model=cost_model))
    parts = balanced_partitions(loads, num_parts=num_parts, equal_size=True)
    return [np.concatenate([np.flatnonzero(groups == group) for group in part]).tolist() for part in parts]


def _whole_numbers(loads: Any) -> list[int]:
    """Python integers of whatever verl gives: a list of tensors' items, a tensor, an array."""
    listed = loads.tolist() if hasattr(loads, "tolist") else [_python_number(load) for load in loads]
    for index, load in enumerate(listed):
        if load < 0 or load != int(load):
            raise BalanceError(f"workload {index} is {load!r}: it must be a whole number of at least 0.")
    return [int(load) for load in listed]


def _python_number(load: Any) -> Any:
    return load.item() if hasattr(load, "item") else load
