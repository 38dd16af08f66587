"""Measures and reorders the rows of DataProto and TensorDict, and splits a DataProto into balanced parts.

verl's pull request on data-parallel balance proposed such a split; here padding rows are part of the order, so that
undoing the order and then trimming them gives every row back.
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

from megatron_balance.adapters.verl.plan import RowOrder, order_rows
from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError


def row_lengths(data: DataProto | TensorDict) -> NDArray[np.int64] | None:
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
    """Tokens of each row of a nested tensor, jagged or strided: int64 `[num_rows]`."""
    if rows.layout == torch.jagged:
        jagged: Any = rows
        return jagged.offsets().diff().long()
    return torch.tensor([row.shape[0] for row in rows.unbind()], dtype=torch.int64, device=rows.device)


def select_rows(data: Any, rows: NDArray[np.int64]) -> Any:
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
