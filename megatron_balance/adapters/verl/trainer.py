"""Replaces the trainers' `_balance_batch`: orders the whole rollout batch, mini-batch by mini-batch.

verl's own method balances mini-batches and then sorts each rank's rows over all of them, so that they mix again. It
counts a mini-batch in prompts where the actor counts it in rows, and takes a uid that occurs again for another group.

Invariants: no row is lost, whatever the sizes; a mini-batch of `ppo_mini_batch_size * rollout.n` rows keeps its rows
(always, or where the caller asks for it: `keep_minibatch`); with the prefix grouper rows of one uid stay neighbours
on one rank.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from verl.utils.seqlen_balancing import log_seqlen_unbalance

from megatron_balance.adapters.kit import split_rollout
from megatron_balance.adapters.verl.plan import RowOrder, group_balanced_partitions, minibatches_in_order, order_rows
from megatron_balance.adapters.verl.rows import row_lengths
from megatron_balance.adapters.verl.settings import Settings
from megatron_balance.errors import BalanceError
from megatron_balance.planner import number_groups


def balance_data_proto_batch(
    settings: Settings,
    trainer: Any,
    batch: Any,
    metrics: dict[str, Any],
    logging_prefix: str = "global_seqlen",
    keep_minibatch: bool = False,
) -> None:
    """`RayPPOTrainer._balance_batch`: orders a DataProto in place."""
    lengths = row_lengths(batch)
    if lengths is None:
        raise BalanceError("a batch is balanced by its attention_mask: it has none.")
    num_ranks = dp_size_of(trainer.actor_rollout_wg)
    minibatch_rows = _minibatch_rows(trainer, settings=settings, keep_minibatch=keep_minibatch)
    if getattr(trainer, "use_prefix_grouper", False) and "uid" in batch.non_tensor_batch:
        order = order_groups(
            lengths,
            uids=batch.non_tensor_batch["uid"],
            num_ranks=num_ranks,
            settings=settings,
            minibatch_rows=minibatch_rows,
        )
    else:
        order = _order(lengths, num_ranks=num_ranks, settings=settings, minibatch_rows=minibatch_rows)
    batch.reorder(torch.from_numpy(order.rows))
    _log(metrics, lengths=lengths, order=order, prefix=logging_prefix)


def balance_key_batch(
    settings: Settings,
    trainer: Any,
    batch: Any,
    metrics: dict[str, Any],
    logging_prefix: str = "global_seqlen",
    keep_minibatch: bool = False,
) -> Any:
    """The v1 trainers' `PPOTrainer._balance_batch`: pads a batch of TransferQueue keys as verl does, and orders it."""
    from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size

    num_ranks = dp_size_of(trainer.actor_rollout_wg)
    multiple = trainer._get_required_batch_multiple(num_ranks)
    batch = upsample_batch_to_divisible_size(batch, multiple, trainer.tokenizer.eos_token_id)
    lengths = np.array([tag["seq_len"] for tag in batch.tags], dtype=np.int64)
    minibatch_rows = _minibatch_rows(trainer, settings=settings, keep_minibatch=keep_minibatch)
    order = _order(lengths, num_ranks=num_ranks, settings=settings, minibatch_rows=minibatch_rows)
    batch.reorder(order.rows.tolist())
    _log(metrics, lengths=lengths, order=order, prefix=logging_prefix)
    return batch


def order_groups(
    lengths: NDArray[np.int64],
    *,
    uids: Sequence[Hashable] | NDArray[Any],
    num_ranks: int,
    settings: Settings,
    minibatch_rows: int | None,
) -> RowOrder:
    """Order in which rows of one uid are neighbours on one rank, and mini-batches hold whole groups.

    Args:
        lengths: `[num_rows]` tokens.
        uids: `[num_rows]` id of the group of each row.
        num_ranks: data-parallel ranks.
        settings: the adapter's.
        minibatch_rows: rows of a mini-batch; None where the batch is one.

    Raises:
        BalanceError: groups differ in size or do not divide among the mini-batches and ranks, so that verl's cut by
            rows would split one.
    """
    groups = number_groups(uids)
    sizes = np.bincount(groups)
    group_size = int(sizes.max())
    groups_per_step = sizes.size if minibatch_rows is None else minibatch_rows // group_size
    steps = split_rollout(uids, global_batch_size=max(groups_per_step, 1)).steps
    uneven = int(sizes.min()) != group_size or (minibatch_rows or group_size) % group_size
    if uneven or any(step.size // group_size % num_ranks for step in steps):
        raise BalanceError(
            f"the prefix grouper has {sizes.size} uids of {int(sizes.min())} to {group_size} rows: each mini-batch "
            f"(actor.ppo_mini_batch_size) must hold a multiple of {num_ranks} uids, one for each data-parallel rank, "
            "all of rollout.n rows."
        )
    parts: list[list[NDArray[np.int64]]] = [[] for _ in range(num_ranks)]
    for step in steps:
        of_step = group_balanced_partitions(
            lengths[step], uids=groups[step], num_parts=num_ranks, cost_model=settings.cost_model
        )
        for rank, items in enumerate(of_step):
            parts[rank].append(step[items])
    return RowOrder(tuple(np.concatenate(slices) for slices in parts))


def dp_size_of(worker_group: Any, *, role: str = "actor") -> int:
    """Data-parallel ranks of a role; the worker group asks its workers once and keeps the answer."""
    if role not in worker_group._dispatch_info:
        worker_group._dispatch_info[role] = worker_group._query_dispatch_info(role)
    return max(worker_group._dispatch_info[role]) + 1


def _minibatch_rows(trainer: Any, *, settings: Settings, keep_minibatch: bool) -> int | None:
    """Rows between two meetings of the ranks, None where rows may change their mini-batch."""
    if not (keep_minibatch or settings.keep_minibatch):
        return None
    config = trainer.config.actor_rollout_ref
    return int(config.actor.ppo_mini_batch_size) * int(config.rollout.n)


def _order(lengths: NDArray[np.int64], *, num_ranks: int, settings: Settings, minibatch_rows: int | None) -> RowOrder:
    minibatches = None if minibatch_rows is None else minibatches_in_order(lengths.size, minibatch_rows=minibatch_rows)
    return order_rows(lengths, num_ranks=num_ranks, cost_model=settings.cost_model, minibatches=minibatches)


def _log(metrics: dict[str, Any], *, lengths: NDArray[np.int64], order: RowOrder, prefix: str) -> None:
    """verl's own metrics of the balance, in tokens."""
    parts = [part.tolist() for part in order.parts]
    metrics.update(log_seqlen_unbalance(seqlen_list=lengths.tolist(), partitions=parts, prefix=prefix))
