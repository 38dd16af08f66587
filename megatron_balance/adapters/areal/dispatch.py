"""Divides batches among data-parallel ranks in one process: `balance_batch`, and the single controller's dispatch.

The controller holds tensors, or handles of remote tensors (`RTensor`) of which it knows only the shape: their rows
count with their padded length.

Invariants: every row comes out once, bit for bit; rows keep their order, and consecutive items of one unit stay
together; every rank gets at least one unit, and all get the same number where the ranks divide it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from megatron_balance.adapters.areal.plan import ids_per_rank, plan_ranks
from megatron_balance.adapters.areal.trajectories import (
    MASK,
    Batch,
    images_of_items,
    join_rows,
    row_lengths,
    split_rows,
)
from megatron_balance.adapters.processor_images import counted_encoder
from megatron_balance.cost.model import CostModel
from megatron_balance.cost.resolve import Model, resolve_cost
from megatron_balance.model.vision import VisionEncoder

Dispatched = tuple[list[list[dict[str, Any]]], list[list[int]]]
"""AReaL's result: for every worker its items, and their positions."""


def balance_batch(
    batches: Sequence[Mapping[str, Any]],
    dp_num: int,
    *,
    cost: str | None = None,
    model: Model | None = None,
    ep_size: int = 1,
) -> list[Batch]:
    """Divides the rows of padded batches among ranks and pads each rank's to its own longest.

    Args:
        batches: one or more dicts of tensors `[num_rows, padded_seq_len, ...]` with `attention_mask`; each may have
            its own number of rows and its own padding.
        dp_num: data-parallel ranks. The one argument that AReaL's callers pass by position.
        cost: `tokens` or `flops`; by default flops where there is a model, else tokens.
        model: preset name, path of a Hugging Face config.json, or ModelShape.
        ep_size: expert-parallel ranks.

    Returns:
        `[dp_num]` batches.

    Raises:
        BalanceError: a batch has no mask, keys differ, or there are fewer rows than ranks.

    Example:
        >>> import torch
        >>> lengths = [8, 1, 2, 7]
        >>> batch = {"attention_mask": torch.arange(8) < torch.tensor(lengths)[:, None]}
        >>> [part["attention_mask"].sum(1).tolist() for part in balance_batch([batch], 2)]
        [[8, 1], [2, 7]]
    """
    lengths = [length for batch in batches for length in row_lengths(batch)]
    rows = [row for batch in batches for row in split_rows(batch)]
    cost_model = resolve_cost(cost, model=model, ep_size=ep_size)
    schedule = plan_ranks(
        lengths,
        num_rows=[1] * len(rows),
        dp_size=dp_num,
        cost_model=cost_model,
        ep_size=ep_size,
        images=images_of_items(rows, encoder=counted_encoder(model, cost_model=cost_model)),
    )
    return [join_rows([rows[index] for index in ids]) for ids in ids_per_rank(schedule)]


def make_dispatch(
    *, cost_model: CostModel, ep_size: int = 1, encoder: VisionEncoder | None = None
) -> Callable[..., Dispatched]:
    """A function in place of AReaL's `_dispatch_tensors`, with its signature.

    Args:
        cost_model: what a row costs.
        ep_size: expert-parallel ranks.
        encoder: runs the images of a row; None where they cost nothing.
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
            images=images_of_items(item_list, encoder=encoder),
        )
        indices = ids_per_rank(schedule)
        return [[item_list[index] for index in of_worker] for of_worker in indices], indices

    return dispatch_tensors


def item_row_lengths(item: Mapping[str, Any]) -> list[int]:
    """Tokens of each row of an item, `[num_rows]`.

    From the mask, else from its handle's shape, else from the first tensor or handle with two axes or more, else one
    row of one token.
    """
    mask = item.get(MASK)
    if isinstance(mask, Tensor):
        return row_lengths(item)
    for value in (mask, *item.values()):
        tensor = value if isinstance(value, Tensor) else getattr(value, "data", None)
        if isinstance(tensor, Tensor) and tensor.dim() >= 2 and len(tensor):
            return [int(tensor.shape[1])] * len(tensor)
    return [1]
