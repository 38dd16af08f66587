"""Divides AReaL's batches among data-parallel ranks: the plan, `balance_batch`, and the single controller's dispatch.

A trajectory is one sample with a segment for each of its rows, since attention stays within a row. Each unit that must
stay together, a trajectory or a pair of them, is a group, and the planner gives every rank the same number of groups.
Every item goes to one rank. Ranks hold the same number of units where the ranks divide it, else at least one each.
Every rank computes the same plan.

The controller holds tensors, or handles of remote tensors (`RTensor`) of which it knows only the shape: their rows
count with their padded length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatron_balance.adapters.areal.trajectories import MASK, Batch, join_rows, row_lengths, split_rows
from megatron_balance.cost.model import CostModel
from megatron_balance.cost.resolve import Model, resolve_cost
from megatron_balance.errors import BalanceError
from megatron_balance.planner import DataSchedule, build_data_schedule
from megatron_balance.topology import Limits, Topology

Dispatched = tuple[list[list[dict[str, Any]]], list[list[int]]]
"""AReaL's result: for every worker its items, and their positions."""


def plan_ranks(
    lengths: Sequence[int] | NDArray[np.int64],
    *,
    num_rows: Sequence[int] | NDArray[np.int64],
    dp_size: int,
    cost_model: CostModel,
    ep_size: int = 1,
    unit_size: int = 1,
    home_ranks: NDArray[np.int64] | None = None,
) -> DataSchedule:
    """Gives every rank as many units as the others, of nearly the same cost.

    Args:
        lengths: `[sum(num_rows)]` tokens of every row, item after item.
        num_rows: `[num_items]` rows of each item.
        dp_size: data-parallel ranks.
        cost_model: what a row costs.
        ep_size: expert-parallel ranks.
        unit_size: consecutive items that stay together, such as the two answers of a reward pair.
        home_ranks: `[num_items]` rank that has each item; ranks of equal cost are then swapped so that less moves.

    Returns:
        DataSchedule: `destinations()` is the rank of each item.

    Raises:
        BalanceError: items do not make up whole units, or there are fewer units than ranks.
    """
    num_items = len(num_rows)
    if unit_size < 1 or num_items % unit_size:
        raise BalanceError(
            f"the number of items ({num_items}) must be divisible by group_size ({unit_size}), which stay together."
        )
    num_units = num_items // unit_size
    if num_units < dp_size:
        raise BalanceError(
            f"{num_units} trajectories (or groups of them) for {dp_size} data-parallel ranks: their number must be >= "
            "that of the ranks, so that every rank has one. Raise the batch size, or use fewer ranks."
        )
    return build_data_schedule(
        lengths,
        num_segments=num_rows,
        cost_model=cost_model,
        topology=Topology(dp_size, ep_size=ep_size),
        # Samples are counted and not tokens: the cap on tokens is AReaL's own, in its micro-batches.
        limits=Limits(micro_batch_size=num_items),
        groups=np.arange(num_items) // unit_size,
        home_ranks=home_ranks,
    )


def ids_per_rank(schedule: DataSchedule) -> list[list[int]]:
    """`[dp_size]` lists of item ids, ascending in each."""
    destinations = schedule.destinations()
    return [np.flatnonzero(destinations == rank).tolist() for rank in range(schedule.topology.dp_size)]


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
    schedule = plan_ranks(lengths, num_rows=[1] * len(rows), dp_size=dp_num, cost_model=cost_model, ep_size=ep_size)
    return [join_rows([rows[index] for index in ids]) for ids in ids_per_rank(schedule)]


def make_dispatch(*, cost_model: CostModel, ep_size: int = 1) -> Callable[..., Dispatched]:
    """A function in place of AReaL's `_dispatch_tensors`, with its signature."""

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
