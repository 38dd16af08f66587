"""The order in which rows must stand so that verl's even cut gives ranks equal work in every mini-batch.

verl cuts a batch into consecutive parts, one a data-parallel rank, and each rank cuts its part into consecutive
slices. Slice i of all ranks together is mini-batch i, and ranks meet after each.

Invariants: an order is a permutation; a mini-batch holds the rows that it is given, whatever their order; every rank
holds the same number of rows of each mini-batch, as near as that goes; forced groups of neighbouring rows stay
neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_balance.adapters.verl.partitions import balanced_partitions
from megatron_balance.adapters.verl.workload import workloads
from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.planner.makespan import mountain_order


@dataclass(frozen=True, eq=False)
class RowOrder:
    """Where each row goes.

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
    loads = workloads(lengths, cost_model=cost_model)
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


def minibatches_in_order(num_rows: int, *, minibatch_rows: int) -> list[NDArray[np.int64]]:
    """Mini-batches of consecutive rows: those of a batch that is not cut for ranks yet. The last may be short."""
    return [np.arange(start, min(start + minibatch_rows, num_rows)) for start in range(0, num_rows, minibatch_rows)]


def minibatches_of_parts(num_rows: int, *, num_ranks: int, minibatch_rows: int) -> list[NDArray[np.int64]]:
    """Mini-batches that verl would form of a batch as it stands: slice i of every rank's part.

    Args:
        num_rows: rows, a multiple of `num_ranks`.
        num_ranks: data-parallel ranks.
        minibatch_rows: rows of a mini-batch over all ranks, a multiple of `num_ranks` that divides `num_rows`.
    """
    by_rank = np.arange(num_rows).reshape(num_ranks, -1, minibatch_rows // num_ranks)
    return [by_rank[:, index].reshape(-1) for index in range(by_rank.shape[1])]
