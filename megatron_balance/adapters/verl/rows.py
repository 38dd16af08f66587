"""Orders the rows of verl's batches, and measures, selects and splits those of DataProto and TensorDict.

verl cuts a batch into consecutive parts, one a data-parallel rank, and each rank cuts its part into consecutive
slices. Slice i of all ranks together is mini-batch i, and ranks meet after each. An order of rows is a permutation. A
mini-batch keeps its rows; every rank gets the same number of them, or nearly (62 rows over 4 ranks: at most 16 each).
Padding rows are part of the order, so that undoing the order and then trimming them gives every row back.
"""

from __future__ import annotations

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
    numbers = loads.tolist() if hasattr(loads, "tolist") else [np.asarray(load).item() for load in loads]
    for index, load in enumerate(numbers):
        if load < 0 or load != int(load):
            raise BalanceError(f"workload {index} is {load!r}: it must be a whole number of at least 0.")
    return [part.tolist() for part in even_parts([*map(int, numbers)], num_parts=num_parts, equal_count=equal_size)]


def order_rows(
    lengths: Ints, *, num_ranks: int, cost_model: CostModel, minibatch_rows: int | None = None
) -> list[Ints]:
    """The rows of each rank, mini-batch after mini-batch: int64 `[num_rows_of_rank]` row indices.

    In every mini-batch of `minibatch_rows`, by default one of all rows, ranks get equal work. Cheap rows are at both
    ends, where a pipeline waits for them.
    """
    loads = sample_costs(lengths, cost_model=cost_model)
    ranks: list[list[Ints]] = [[] for _ in range(num_ranks)]
    for start in range(0, lengths.size, minibatch_rows or lengths.size):
        minibatch = loads[start:][:minibatch_rows]
        for rows, part in zip(ranks, balanced_partitions(minibatch, num_parts=num_ranks, equal_size=True), strict=True):
            rows.append(start + np.array(part)[organ_pipe_order(minibatch[part][None, :])[0]])
    return [*map(np.concatenate, ranks)]


def row_lengths(data: DataProto | TensorDict) -> Ints | None:
    """Tokens of each row: int64 `[num_rows]`, or None without usable `input_ids` or `attention_mask`."""
    tensors = data.batch if isinstance(data, DataProto) else data
    if tensors is None or not len(tensors.batch_size):
        return None
    mask, ids = tensors.get("attention_mask", None), tensors.get("input_ids", None)
    if isinstance(ids, torch.Tensor) and ids.is_nested:
        jagged: Any = ids  # as nested tensors are in verl
        return jagged.offsets().diff().long().cpu().numpy()
    if isinstance(mask, torch.Tensor) and not mask.is_nested and mask.dim() > 1:
        return mask.reshape(mask.shape[0], -1).long().sum(dim=-1).cpu().numpy()
    return None


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
    order: Ints  # the rows of the padded batch, part after part
    num_rows: int  # before padding

    def restore(self, outputs: list[DataProto]) -> DataProto:
        """Joins the ranks' outputs in the original order of the rows, without the padding.

        Raises:
            BalanceError: the outputs do not have a row for each row of the parts.
        """
        output = DataProto.concat(outputs)
        if len(output) != self.order.size:
            raise BalanceError(f"the ranks returned {len(output)} rows for {self.order.size}.")
        # First in order, then trimmed: the padding is at the end only once the order is undone.
        return select_rows(output, np.argsort(self.order, kind="stable")[: self.num_rows])


def split_rows(data: DataProto, num_parts: int, *, cost_model: CostModel) -> BalancedData:
    """A DataProto in parts of equal size and nearly equal work, padded by copies of its last row."""
    lengths = row_lengths(data)
    if lengths is None or not lengths.size:
        raise BalanceError("a DataProto is balanced by its attention_mask or nested input_ids: it has no such rows.")
    padded = np.concatenate([np.arange(lengths.size), np.full(-lengths.size % num_parts, lengths.size - 1)])
    ranks = order_rows(lengths[padded], num_ranks=num_parts, cost_model=cost_model)
    return BalancedData(tuple(select_rows(data, padded[rows]) for rows in ranks), np.concatenate(ranks), lengths.size)
