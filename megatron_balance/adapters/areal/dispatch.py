"""The single controller's dispatch: trajectories dealt out to data-parallel workers before any of them runs.

The controller holds tensors, or handles of tensors that lie elsewhere (`RTensor`), of which it knows the shape alone:
their rows count as long as they are padded.

Invariants: consecutive items of one unit stay together and in order; every worker gets a unit; where their number
divides, all get the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from megatron_balance.adapters.areal.planning import ids_per_rank, plan_ranks
from megatron_balance.adapters.areal.trajectories import MASK, row_lengths
from megatron_balance.cost.model import CostModel

Dispatched = tuple[list[list[dict[str, Any]]], list[list[int]]]
"""What AReaL expects: for every worker its items, and their positions."""


def make_dispatch(*, cost_model: CostModel, ep_size: int = 1) -> Callable[..., Dispatched]:
    """A function in place of AReaL's `_dispatch_tensors`, with its signature.

    Args:
        cost_model: what a row costs.
        ep_size: expert-parallel ranks.
    """

    def dispatch_tensors(item_list: list[dict[str, Any]], dp_size: int, group_size: int = 1) -> Dispatched:
        rows = [item_row_lengths(item) for item in item_list]
        schedule = plan_ranks(
            [length for of_item in rows for length in of_item],
            num_rows=[len(of_item) for of_item in rows],
            dp_size=dp_size,
            cost_model=cost_model,
            ep_size=ep_size,
            unit_size=group_size,
        )
        indices = ids_per_rank(schedule)
        return [[item_list[index] for index in of_worker] for of_worker in indices], indices

    return dispatch_tensors


def item_row_lengths(item: Mapping[str, Any]) -> list[int]:
    """Tokens of each row of an item, `[num_rows]`; one row of one token where nothing tells.

    The mask tells, else its handle's shape, else that of the first tensor or handle of two axes or more.
    """
    mask = item.get(MASK)
    if isinstance(mask, Tensor):
        return row_lengths(item)
    for value in (mask, *item.values()):
        tensor = value if isinstance(value, Tensor) else getattr(value, "data", None)
        if isinstance(tensor, Tensor) and tensor.dim() >= 2 and len(tensor):
            return [int(tensor.shape[1])] * len(tensor)
    return [1]
