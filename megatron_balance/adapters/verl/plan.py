"""Plans verl's batches: partitions of workloads, and row orders that are balanced when verl cuts them evenly.

verl cuts a batch into consecutive parts, one a data-parallel rank, and each rank cuts its part into consecutive
slices. Slice i of all ranks together is mini-batch i, and ranks meet after each. An order of rows is a permutation. A
mini-batch keeps its rows; every rank holds the same number of them, or nearly (62 rows over 4 ranks: at most 16 each);
rows of one unit, such as those of a uid, stay neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.adapters.kit import even_parts, row_costs
from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.planner import mountain_order

Ints = NDArray[np.int64]


def balanced_partitions(loads: Any, *, num_parts: int, equal_size: bool) -> list[list[int]]:
    """Replaces verl's `get_seqlen_balanced_partitions`: `[num_parts]` lists of indices, ascending, none empty.

    Loads are non-negative whole numbers: a list, an array or a tensor (of floats as well).
    """
    # As Python objects: sums of costs may leave int64.
    listed = loads.tolist() if hasattr(loads, "tolist") else [np.asarray(load).item() for load in loads]
    for index, load in enumerate(listed):
        if load < 0 or load != int(load):
            raise BalanceError(f"workload {index} is {load!r}: it must be a whole number of at least 0.")
    if not 1 <= num_parts <= len(listed):
        raise BalanceError(f"k_partitions is {num_parts}: it must be from 1 to the {len(listed)} items.")
    return [part.tolist() for part in even_parts([*map(int, listed)], num_parts=num_parts, equal_count=equal_size)]


@dataclass(frozen=True, eq=False)
class RowOrder:
    """The rows of each rank: int64 `[num_rows_of_rank]` row indices, mini-batch after mini-batch."""

    parts: tuple[Ints, ...]

    @property
    def rows(self) -> Ints:
        """Int64 `[num_rows]`: the row that stands at each place."""
        return np.concatenate(self.parts)

    @property
    def places(self) -> Ints:
        """Int64 `[num_rows]`: the place at which each row stands, which puts results back in order."""
        return np.argsort(self.rows, kind="stable")


def order_rows(
    lengths: Ints,
    *,
    num_ranks: int,
    cost_model: CostModel,
    minibatches: Sequence[Ints] | None = None,
    units: Ints | None = None,
) -> RowOrder:
    """Gives every rank equal work in every mini-batch, with cheap rows at both ends, where a pipeline waits for them.

    Args:
        lengths: `[num_rows]` tokens.
        num_ranks: data-parallel ranks.
        cost_model: what a row costs.
        minibatches: row indices of each mini-batch, all rows once; None where the batch is one.
        units: `[num_rows]` unit of each row; rows of a unit stay together.
    """
    loads = row_costs(lengths, cost_model=cost_model)
    units = np.arange(lengths.size) if units is None else units
    parts: list[list[Ints]] = [[] for _ in range(num_ranks)]
    for ids in [np.arange(lengths.size)] if minibatches is None else minibatches:
        _, counts = np.unique(units[ids], return_counts=True)
        rows_of_units = np.split(ids[np.argsort(units[ids], kind="stable")], np.cumsum(counts)[:-1])
        unit_loads = np.array([loads[rows].sum() for rows in rows_of_units])
        for rank, items in enumerate(balanced_partitions(unit_loads, num_parts=num_ranks, equal_size=True)):
            chosen = np.array(items, dtype=np.int64)
            order = mountain_order(unit_loads[chosen][None, :])[0]
            parts[rank] += [rows_of_units[unit] for unit in chosen[order]]
    return RowOrder(tuple(map(np.concatenate, parts)))


def minibatches_of_parts(num_rows: int, *, num_ranks: int, minibatch_rows: int) -> list[Ints]:
    """The mini-batches that verl forms from a batch in its present order: slice i of every rank's part."""
    by_rank = np.arange(num_rows).reshape(num_ranks, -1, minibatch_rows // num_ranks)
    return [by_rank[:, index].reshape(-1) for index in range(by_rank.shape[1])]
