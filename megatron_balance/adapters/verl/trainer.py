"""Replaces the trainers' `_balance_batch`: orders the whole rollout batch, mini-batch by mini-batch.

verl's own method balances mini-batches and then sorts each rank's rows over all of them, so that they mix again. It
counts a mini-batch in prompts where the actor counts it in rows, and takes a uid that occurs again for another group.

Invariants: no row is lost, whatever the sizes; a mini-batch of `ppo_mini_batch_size * rollout.n` rows keeps its rows,
since ranks meet after each, whether or not verl asks for it (`keep_minibatch`); with the prefix grouper rows of one uid
stay neighbours on one rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from verl.utils.seqlen_balancing import log_seqlen_unbalance

from megatron_balance.adapters.kit import split_rollout
from megatron_balance.adapters.verl.plan import RowOrder, group_balanced_partitions, order_rows
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
    del keep_minibatch
    lengths = row_lengths(batch)
    if lengths is None:
        raise BalanceError("a batch is balanced by its attention_mask: it has none.")
    uids = batch.non_tensor_batch.get("uid") if getattr(trainer, "use_prefix_grouper", False) else None
    order = _order(lengths, trainer=trainer, settings=settings, uids=uids)
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
    del keep_minibatch
    from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size

    multiple = trainer._get_required_batch_multiple(_dp_size_of(trainer))
    batch = upsample_batch_to_divisible_size(batch, multiple, trainer.tokenizer.eos_token_id)
    lengths = np.array([tag["seq_len"] for tag in batch.tags], dtype=np.int64)
    order = _order(lengths, trainer=trainer, settings=settings)
    batch.reorder(order.rows.tolist())
    _log(metrics, lengths=lengths, order=order, prefix=logging_prefix)
    return batch


def _order(
    lengths: NDArray[np.int64], *, trainer: Any, settings: Settings, uids: NDArray[Any] | None = None
) -> RowOrder:
    """The order of a rollout batch; with uids their rows are neighbours on one rank."""
    num_ranks, config = _dp_size_of(trainer), trainer.config.actor_rollout_ref
    minibatch_rows = int(config.actor.ppo_mini_batch_size) * int(config.rollout.n)
    if uids is None:
        starts = range(0, lengths.size, minibatch_rows)
        minibatches = [np.arange(start, min(start + minibatch_rows, lengths.size)) for start in starts]
        return order_rows(lengths, num_ranks=num_ranks, cost_model=settings.cost_model, minibatches=minibatches)
    groups = number_groups(uids)
    sizes = np.bincount(groups)
    group_size = int(sizes.max())
    steps = split_rollout(uids, global_batch_size=max(minibatch_rows // group_size, 1)).steps
    uneven = int(sizes.min()) != group_size or minibatch_rows % group_size
    if uneven or any(step.size // group_size % num_ranks for step in steps):
        # verl's cut by rows would split a group.
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


def _dp_size_of(trainer: Any) -> int:
    """Data-parallel ranks of the actor; the worker group asks its workers once and keeps the answer."""
    known = trainer.actor_rollout_wg._dispatch_info
    if "actor" not in known:
        known["actor"] = trainer.actor_rollout_wg._query_dispatch_info("actor")
    return max(known["actor"]) + 1


def _log(metrics: dict[str, Any], *, lengths: NDArray[np.int64], order: RowOrder, prefix: str) -> None:
    """verl's own metrics of the balance, in tokens."""
    parts = [part.tolist() for part in order.parts]
    metrics.update(log_seqlen_unbalance(seqlen_list=lengths.tolist(), partitions=parts, prefix=prefix))
