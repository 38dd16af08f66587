"""Plans verl's batches: partitions of workloads, and row orders that are balanced when verl cuts them evenly.

Partitions are the planner's, of rows or of groups of rows that share a uid. Every index occurs
once, and no part is empty. With `equal_size` parts hold the same number of items, or at most the quotient rounded up
where the number of parts does not divide (62 rows over 4 ranks: at most 16 each).

verl cuts a batch into consecutive parts, one a data-parallel rank, and each rank cuts its part into consecutive
slices. Slice i of all ranks together is mini-batch i, and ranks meet after each. An order of rows is a permutation. A
mini-batch keeps its rows; every rank holds the same number of them, or nearly; forced groups of neighbouring rows stay
neighbours.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.adapters.kit import even_parts, row_costs
from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.planner import mountain_order, number_groups


def balanced_partitions(
    loads: Sequence[int] | NDArray[np.int64], *, num_parts: int, equal_size: bool
) -> list[list[int]]:
    """Replaces verl's `get_seqlen_balanced_partitions`.

    Args:
        loads: `[num_items]` non-negative whole numbers: a list, an array or a tensor (of floats as well).
        num_parts: parts to make.
        equal_size: every part holds the same number of items, or the quotient rounded up at most.

    Returns:
        `[num_parts]` lists of indices, ascending; larger parts first where they differ in number.

    Raises:
        BalanceError: there are fewer items than parts, or a load is negative or a fraction.
    """
    values = _whole_numbers(loads)
    if not 1 <= num_parts <= len(values):
        raise BalanceError(f"k_partitions is {num_parts}: it must be from 1 to the {len(values)} items.")
    return [part.tolist() for part in even_parts(values, num_parts=num_parts, equal_count=equal_size)]


def group_balanced_partitions(
    lengths: NDArray[np.int64],
    *,
    uids: Sequence[Hashable] | NDArray[Any],
    num_parts: int,
    cost_model: CostModel,
) -> list[list[int]]:
    """Replaces verl's `get_group_balanced_partitions`: rows of one uid stay together.

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
    np.add.at(loads, groups, row_costs(lengths, cost_model=cost_model))
    parts = balanced_partitions(loads, num_parts=num_parts, equal_size=True)
    return [np.concatenate([np.flatnonzero(groups == group) for group in part]).tolist() for part in parts]


@dataclass(frozen=True, eq=False)
class RowOrder:
    """The rows of each rank, in order.

    Attributes:
        parts: for every rank int64 `[num_rows_of_rank]` row indices, mini-batch after mini-batch.
    """

    parts: tuple[NDArray[np.int64], ...]

    @property
    def rows(self) -> NDArray[np.int64]:
        """Int64 `[num_rows]`: the row that stands at each place."""
        return np.concatenate(self.parts)

    @property
    def places(self) -> NDArray[np.int64]:
        """Int64 `[num_rows]`: the place at which each row stands, which puts results back in order."""
        return np.argsort(self.rows, kind="stable")


def order_rows(
    lengths: NDArray[np.int64],
    *,
    num_ranks: int,
    cost_model: CostModel,
    minibatches: Sequence[NDArray[np.int64]] | None = None,
    force_group_size: int = 1,
) -> RowOrder:
    """Gives every rank equal work in every mini-batch.

    Args:
        lengths: `[num_rows]` tokens.
        num_ranks: data-parallel ranks.
        cost_model: what a row costs.
        minibatches: row indices of each mini-batch, all rows once; None where the batch is one.
        force_group_size: neighbouring rows that stay together.

    Returns:
        RowOrder: cheap rows at both ends of each slice, where a pipeline waits for them.

    Raises:
        BalanceError: a mini-batch has fewer rows than ranks, or cannot be cut into groups.
    """
    loads = row_costs(lengths, cost_model=cost_model)
    parts: list[list[NDArray[np.int64]]] = [[] for _ in range(num_ranks)]
    for ids in [np.arange(lengths.size)] if minibatches is None else minibatches:
        if ids.size % force_group_size:
            raise BalanceError(
                f"a mini-batch has {ids.size} rows: it must be a multiple of force_group_size {force_group_size}."
            )
        groups = ids.reshape(-1, force_group_size)
        group_loads = loads[groups].sum(axis=1)
        for rank, items in enumerate(balanced_partitions(group_loads, num_parts=num_ranks, equal_size=True)):
            chosen = np.array(items, dtype=np.int64)
            order = mountain_order(group_loads[chosen][None, :])[0]
            parts[rank].append(groups[chosen[order]].reshape(-1))
    return RowOrder(tuple(np.concatenate(slices) for slices in parts))


def minibatches_of_parts(num_rows: int, *, num_ranks: int, minibatch_rows: int) -> list[NDArray[np.int64]]:
    """The mini-batches that verl forms from a batch in its present order: slice i of every rank's part.

    Args:
        num_rows: rows, a multiple of `num_ranks`.
        num_ranks: data-parallel ranks.
        minibatch_rows: rows of a mini-batch over all ranks, a multiple of `num_ranks` that divides `num_rows`.
    """
    by_rank = np.arange(num_rows).reshape(num_ranks, -1, minibatch_rows // num_ranks)
    return [by_rank[:, index].reshape(-1) for index in range(by_rank.shape[1])]


def _whole_numbers(loads: Any) -> list[int]:
    """Python integers of an array, a tensor, or a list of numbers or of tensors' items."""
    # As Python objects: sums of costs may leave int64.
    listed = loads.tolist() if hasattr(loads, "tolist") else [np.asarray(load).item() for load in loads]
    for index, load in enumerate(listed):
        if load < 0 or load != int(load):
            raise BalanceError(f"workload {index} is {load!r}: it must be a whole number of at least 0.")
    return [int(load) for load in listed]
