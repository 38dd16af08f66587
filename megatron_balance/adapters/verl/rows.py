"""Orders the rows of verl's batches, and measures, selects and splits those of DataProto and TensorDict.

verl cuts a batch into consecutive parts, one a data-parallel rank, and each rank cuts its part into consecutive
slices. Slice i of all ranks together is mini-batch i, and ranks meet after each. An order of rows is a permutation. A
mini-batch keeps its rows; every rank holds the same number of them, or nearly (62 rows over 4 ranks: at most 16 each);
rows of one unit, such as those of a uid, stay neighbours. Padding rows are part of the order, so that undoing the order
and then trimming them gives every row back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.utils import tensordict_utils

from megatron_balance.adapters.kit import even_parts, sample_costs
from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.planner import organ_pipe_order

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

    `minibatches` are row indices, all rows once; None where the batch is one. Rows of a unit of `units` stay together.
    """
    loads = sample_costs(lengths, cost_model=cost_model)
    units = np.arange(lengths.size) if units is None else units
    parts: list[list[Ints]] = [[] for _ in range(num_ranks)]
    for ids in [np.arange(lengths.size)] if minibatches is None else minibatches:
        _, counts = np.unique(units[ids], return_counts=True)
        rows_of_units = np.split(ids[np.argsort(units[ids], kind="stable")], np.cumsum(counts)[:-1])
        unit_loads = np.array([loads[rows].sum() for rows in rows_of_units])
        for rank, items in enumerate(balanced_partitions(unit_loads, num_parts=num_ranks, equal_size=True)):
            chosen = np.array(items, dtype=np.int64)
            order = organ_pipe_order(unit_loads[chosen][None, :])[0]
            parts[rank] += [rows_of_units[unit] for unit in chosen[order]]
    return RowOrder(tuple(map(np.concatenate, parts)))


def row_lengths(data: DataProto | TensorDict) -> Ints | None:
    """Tokens of each row: int64 `[num_rows]`, or None without usable `input_ids` or `attention_mask`."""
    tensors = data.batch if isinstance(data, DataProto) else data
    if tensors is None or not len(tensors.batch_size):
        return None
    mask, ids = tensors.get("attention_mask", None), tensors.get("input_ids", None)
    if isinstance(ids, torch.Tensor) and ids.is_nested:
        return nested_lengths(ids).cpu().numpy()
    if isinstance(mask, torch.Tensor) and not mask.is_nested and mask.dim() > 1:
        return mask.reshape(mask.shape[0], -1).long().sum(dim=-1).cpu().numpy()
    return None


def nested_lengths(rows: torch.Tensor) -> torch.Tensor:
    """Tokens of each row of a nested tensor, which are jagged in verl: int64 `[num_rows]`."""
    jagged: Any = rows
    return jagged.offsets().diff().long()


def select_rows(data: Any, rows: Ints) -> Any:
    """The rows of a DataProto or TensorDict in this order, as a new one."""
    index = torch.from_numpy(rows)
    if not isinstance(data, DataProto):
        return tensordict_utils.index_select_tensor_dict(data, index)
    # Not select_idxs, which cannot index nested tensors.
    batch = None if data.batch is None else tensordict_utils.index_select_tensor_dict(data.batch, index)
    columns = {key: column[rows] for key, column in data.non_tensor_batch.items()}
    return type(data)(batch=batch, non_tensor_batch=columns, meta_info=data.meta_info)


@dataclass(frozen=True, eq=False)
class BalancedData:
    """A DataProto cut into parts of equal work, one a rank, all with the same number of rows."""

    parts: tuple[DataProto, ...]
    order: RowOrder  # of the padded batch
    num_rows: int  # before padding

    def restore(self, outputs: list[DataProto]) -> DataProto:
        """Joins the ranks' outputs in the original order of the rows, without the padding.

        Raises:
            BalanceError: the outputs do not have a row for each row of the parts.
        """
        output = DataProto.concat(outputs)
        if len(output) != self.order.rows.size:
            raise BalanceError(f"the ranks returned {len(output)} rows for {self.order.rows.size}.")
        # First in order, then trimmed: the padding is at the end only once the order is undone.
        return select_rows(output, self.order.places[: self.num_rows])


def split_rows(data: DataProto, num_parts: int, *, cost_model: CostModel) -> BalancedData:
    """A DataProto in parts of equal size and nearly equal work, padded by copies of its last row."""
    lengths = row_lengths(data)
    if lengths is None or not lengths.size:
        raise BalanceError("a DataProto is balanced by its attention_mask or nested input_ids: it has no such rows.")
    padded = np.concatenate([np.arange(lengths.size), np.full(-lengths.size % num_parts, lengths.size - 1)])
    order = order_rows(lengths[padded], num_ranks=num_parts, cost_model=cost_model)
    return BalancedData(tuple(select_rows(data, padded[part]) for part in order.parts), order, lengths.size)
