"""The hooks in verl, in a checked table, and what they put in place.

verl's modules bind functions by value. Modules that are loaded are hooked at once. The trainers load later than the
plug-in: they are hooked when the first worker group is made, in the one process that has a trainer.

Invariants: no row is lost, whatever the sizes; a mini-batch of `ppo_mini_batch_size * rollout.n` rows keeps its rows,
since ranks meet after each, and so does one of the critic's; with the prefix grouper rows of one uid stay neighbours on
one rank.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from verl.utils.device import get_device_name
from verl.utils.seqlen_balancing import log_seqlen_unbalance

from megatron_balance.adapters.kit import Function, Hook, sample_costs, split_rollout
from megatron_balance.adapters.kit.ranks import agreed_microbatches
from megatron_balance.adapters.verl import installation
from megatron_balance.adapters.verl.rows import (
    RowOrder,
    balanced_partitions,
    nested_lengths,
    order_rows,
    row_lengths,
    select_rows,
)
from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.planner import number_groups

BALANCING = "verl.utils.seqlen_balancing"
RAY_TRAINER = "verl.trainer.ppo.ray_trainer"
V1_TRAINER = "verl.trainer.ppo.v1.trainer_base"
TRAINERS = (RAY_TRAINER, V1_TRAINER, "verl.trainer.sft_trainer_ray")


def table() -> tuple[Hook, ...]:
    """The hooks, of the modules that are loaded: it is installed again once the trainers are."""

    def row(target: str, parameters: str, balanced: Function, reason: str, *, bound_in: tuple[str, ...] = ()) -> Hook:
        return Hook(
            target=target,
            parameters=tuple(parameters.split()),
            wrap=lambda stock: installation.while_installed(stock, balanced),
            reason=reason,
            until="verl takes such a function, and the factor from the model",
            bound_in=bound_in,
            late=True,
        )

    return (
        row(
            f"{BALANCING}:calculate_workload",
            "seqlen_list",
            _calculate_workload,
            "its factor is that of one 7B model, and its sums overflow in its input's dtype",
            bound_in=(BALANCING, *TRAINERS),
        ),
        row(
            f"{BALANCING}:get_seqlen_balanced_partitions",
            "seqlen_list k_partitions equal_size",
            _get_partitions,
            "largest differencing alone is weak on heavy tails, and asserts where ranks do not divide the rows",
            bound_in=(BALANCING, *TRAINERS),
        ),
        row(
            f"{BALANCING}:rearrange_micro_batches",
            "batch max_token_len dp_group num_batches_divided_by same_micro_num_in_dp min_num_micro_batch "
            "use_dynamic_bsz_balance force_group_size",
            _rearrange_micro_batches,
            "it raises the count until largest differencing happens to fit the cap",
            bound_in=(BALANCING, "verl.workers.engine.utils"),
        ),
        row(
            f"{RAY_TRAINER}:RayPPOTrainer._balance_batch",
            "self batch metrics logging_prefix keep_minibatch",
            functools.partial(_balance_batch, of_keys=False),
            "it sorts rows over mini-batches, which it counts in prompts",
        ),
        row(
            f"{V1_TRAINER}:PPOTrainer._balance_batch",
            "self batch metrics logging_prefix keep_minibatch",
            functools.partial(_balance_batch, of_keys=True),
            "it does not look at keep_minibatch",
        ),
    )


def worker_group_hook() -> Hook:
    """The process that makes worker groups has the trainer, which loads later than the plug-in."""
    return Hook(
        target="verl.single_controller.ray.base:func_generator",
        wrap=_after_trainers,
        reason="the first call that the trainer's process makes once its trainer is loaded",
        until="verl loads plug-ins after its trainers",
    )


def _after_trainers(bind: Function) -> Function:
    def hooked(_: CostModel, *positional: Any, **keywords: Any) -> Any:
        installation.install_late(table)
        return bind(*positional, **keywords)

    return installation.while_installed(bind, hooked)


def _calculate_workload(cost_model: CostModel, seqlen_list: Any) -> torch.Tensor:
    """int64 costs of the lengths' shape, on their device; `[num_rows]` for a nested tensor of the rows themselves."""
    given = torch.as_tensor(seqlen_list)
    lengths = nested_lengths(given) if given.is_nested else given.long()
    costs = sample_costs(lengths.cpu().numpy(), cost_model=cost_model)
    return torch.from_numpy(costs).to(lengths.device)


def _get_partitions(_: CostModel, seqlen_list: Any, k_partitions: int, equal_size: bool) -> list[list[int]]:
    return balanced_partitions(seqlen_list, num_parts=k_partitions, equal_size=equal_size)


def _rearrange_micro_batches(
    cost_model: CostModel,
    batch: Any,
    max_token_len: int,
    dp_group: Any = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
    force_group_size: int = 1,
) -> tuple[list[Any], list[list[int]]]:
    """The fewest micro-batches under the cap, of nearly equal work; the same number on every rank of the group."""
    known = row_lengths(batch)
    together = dist.is_initialized() and same_micro_num_in_dp and dp_group is not None
    planned = agreed_microbatches(
        np.zeros(0, dtype=np.int64) if known is None else known,
        max_tokens=int(max_token_len),
        cost_model=cost_model,
        least=min_num_micro_batch or 1,
        multiple=num_batches_divided_by or 1,
        samples_per_unit=force_group_size,
        mountain=use_dynamic_bsz_balance,
        flag="max_token_len",
        group=dp_group if together else None,
        device=get_device_name(),
    )
    return [select_rows(batch, np.array(rows, dtype=np.int64)) for rows in planned], planned


def _balance_batch(
    cost_model: CostModel,
    trainer: Any,
    batch: Any,
    metrics: dict[str, Any],
    logging_prefix: str = "global_seqlen",
    keep_minibatch: bool = False,
    *,
    of_keys: bool,
) -> Any:
    """Orders a rollout batch in place: a DataProto, or TransferQueue keys, which are padded first as verl does."""
    uids = None
    if of_keys:
        from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size

        multiple = trainer._get_required_batch_multiple(_dp_size_of(trainer))
        batch = upsample_batch_to_divisible_size(batch, multiple, trainer.tokenizer.eos_token_id)
        lengths = np.array([tag["seq_len"] for tag in batch.tags], dtype=np.int64)
    else:
        lengths = row_lengths(batch)
        if lengths is None:
            raise BalanceError("a batch is balanced by its attention_mask: it has none.")
        uids = batch.non_tensor_batch.get("uid") if getattr(trainer, "use_prefix_grouper", False) else None
    order = _order(lengths, trainer=trainer, cost_model=cost_model, uids=uids)
    batch.reorder(order.rows.tolist() if of_keys else torch.from_numpy(order.rows))
    parts = [part.tolist() for part in order.parts]
    # verl's own metrics of the balance, in tokens.
    metrics.update(log_seqlen_unbalance(seqlen_list=lengths.tolist(), partitions=parts, prefix=logging_prefix))
    return batch


def _order(
    lengths: NDArray[np.int64], *, trainer: Any, cost_model: CostModel, uids: NDArray[Any] | None = None
) -> RowOrder:
    """The order of a rollout batch; with uids their rows are neighbours on one rank."""
    num_ranks, groups = _dp_size_of(trainer), None
    rows_per_group = 1 if uids is None else int(trainer.config.actor_rollout_ref.rollout.n)
    minibatch_rows = _minibatch_rows(trainer, num_parts=num_ranks * rows_per_group)
    starts = range(0, lengths.size, minibatch_rows)
    minibatches = [np.arange(start, min(start + minibatch_rows, lengths.size)) for start in starts]
    if uids is not None:
        groups = number_groups(uids)
        sizes = np.bincount(groups)
        group_size = int(sizes.max())
        minibatches = split_rollout(uids, global_batch_size=max(minibatch_rows // group_size, 1))
        uneven = int(sizes.min()) != group_size or minibatch_rows % group_size
        if uneven or any(rows.size // group_size % num_ranks for rows in minibatches):
            # verl's cut by rows would split a group.
            raise BalanceError(
                f"the prefix grouper has {sizes.size} uids of {int(sizes.min())} to {group_size} rows: each mini-batch "
                f"(actor.ppo_mini_batch_size) must hold a multiple of {num_ranks} uids, one for each data-parallel "
                "rank, all of rollout.n rows."
            )
    return order_rows(lengths, num_ranks=num_ranks, cost_model=cost_model, minibatches=minibatches, units=groups)


def _minibatch_rows(trainer: Any, *, num_parts: int) -> int:
    """Rows of the actor's mini-batch; of the critic's where that is smaller, divides it, and the parts divide that."""
    config = trainer.config.actor_rollout_ref
    of_actor = int(config.actor.ppo_mini_batch_size) * int(config.rollout.n)
    if not trainer.use_critic:
        return of_actor
    of_critic = int(trainer.config.critic.ppo_mini_batch_size) * int(config.rollout.n)
    return of_actor if of_actor % of_critic or of_critic % num_parts else of_critic


def _dp_size_of(trainer: Any) -> int:
    """Data-parallel ranks of the actor, from the worker group's answer where it has asked its workers."""
    group = trainer.actor_rollout_wg
    return max(group._dispatch_info.get("actor") or group._query_dispatch_info("actor")) + 1
