"""The hooks in verl, in a checked table, and what they put in place.

verl's modules bind functions by value. Modules that are loaded are hooked at once; those that load later bind the
hooks, and keep them after `undo`. The trainers load later than the plug-in: their methods are hooked when the first
worker group is made, in the one process that has a trainer.

verl cuts a batch into consecutive parts, one a data-parallel rank, and each rank cuts its part into consecutive
slices. Slice i of all ranks together is mini-batch i, and ranks meet after each. An order of rows is a permutation.
Padding rows are part of it, so that undoing the order and then trimming them gives every row back.

Invariants: no row is lost, whatever the sizes; a mini-batch of `ppo_mini_batch_size * rollout.n` rows keeps its rows;
every rank gets the same number of them, or nearly (62 rows over 4 ranks: at most 16 each). Batches of the prefix
grouper, whose uids stay together, are ordered by verl.
"""

from __future__ import annotations

import functools
import logging
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.utils import tensordict_utils
from verl.utils.device import get_device_name
from verl.utils.seqlen_balancing import log_seqlen_unbalance

from megatron_balance.adapters.kit import Function, Hook, agreed_microbatches, even_parts, sample_costs
from megatron_balance.adapters.verl import installation
from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.planner import organ_pipe_order

Ints = NDArray[np.int64]

logger = logging.getLogger(__name__)

BALANCING = "verl.utils.seqlen_balancing"
RAY_TRAINER = "verl.trainer.ppo.ray_trainer"
V1_TRAINER = "verl.trainer.ppo.v1.trainer_base"
TRAINERS = (RAY_TRAINER, V1_TRAINER, "verl.trainer.sft_trainer_ray")


def functions(cost_model: CostModel) -> list[Hook]:
    """The hooks of functions, where loaded modules have bound them: a module that loads later binds the hook."""

    def row(balanced: Function, target: str, reason: str, *users: str) -> Hook:
        bound_in = tuple(module for module in (BALANCING, *users) if module in sys.modules)
        return Hook.around(f"{BALANCING}:{target}", balanced, cost_model, bound_in=bound_in, reason=reason)

    return [
        row(
            _calculate_workload,
            "calculate_workload",
            "its factor is that of one 7B model, and its sums overflow in its input's dtype",
            *TRAINERS,
        ),
        row(
            _get_partitions,
            "get_seqlen_balanced_partitions",
            "largest differencing alone is weak on heavy tails, and asserts where ranks do not divide the rows",
            *TRAINERS,
        ),
        row(
            _rearrange_micro_batches,
            "rearrange_micro_batches",
            "it raises the count until largest differencing happens to fit the cap",
            "verl.workers.engine.utils",
        ),
        Hook.around(
            "verl.single_controller.ray.base:func_generator",
            _after_trainers,
            cost_model,
            reason="the first call that the trainer's process makes once its trainer is loaded",
            # Until verl loads plug-ins after its trainers.
        ),
    ]


def methods(cost_model: CostModel) -> list[Hook]:
    """The hooks of the trainers that are loaded and have none yet."""
    return [
        Hook.around(
            f"{module}:{name}._balance_batch",
            _balance_batch,
            cost_model,
            reason="it sorts rows over mini-batches",
        )
        for module, name in ((RAY_TRAINER, "RayPPOTrainer"), (V1_TRAINER, "PPOTrainer"))
        if module in sys.modules and not hasattr(vars(sys.modules[module])[name]._balance_batch, "__wrapped__")
    ]


def _after_trainers(cost_model: CostModel, stock: Function, *positional: Any, **keywords: Any) -> Any:
    installation.install_late(lambda: methods(cost_model))
    return stock(*positional, **keywords)


def _calculate_workload(cost_model: CostModel, stock: Function, seqlen_list: Any) -> torch.Tensor:
    """int64 costs of the lengths' shape, on their device."""
    lengths = torch.as_tensor(seqlen_list).long()
    return torch.from_numpy(sample_costs(lengths.cpu().numpy(), cost_model=cost_model)).to(lengths.device)


def _get_partitions(
    _: CostModel, stock: Function, seqlen_list: Any, k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """`[k_partitions]` lists of indices, ascending, none empty."""
    loads = torch.as_tensor(seqlen_list).long().cpu().numpy()
    parts = even_parts(loads, num_parts=k_partitions, equal_count=equal_size)
    return [part.tolist() for part in parts]


def _rearrange_micro_batches(
    cost_model: CostModel,
    stock: Function,
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
    lengths = row_lengths(batch)
    is_shared = dist.is_initialized() and same_micro_num_in_dp and dp_group is not None
    slots = agreed_microbatches(
        np.zeros(0, dtype=np.int64) if lengths is None else lengths,
        max_tokens=int(max_token_len),
        cost_model=cost_model,
        min_count=min_num_micro_batch or 1,
        multiple=num_batches_divided_by or 1,
        samples_per_unit=force_group_size,
        mountain=use_dynamic_bsz_balance,
        flag="max_token_len",
        group=dp_group if is_shared else None,
        device=get_device_name(),
    )
    return [select_rows(batch, np.array(rows, dtype=np.int64)) for rows in slots], slots


def _balance_batch(
    cost_model: CostModel,
    stock: Function,
    self: Any,
    batch: Any,
    metrics: dict[str, Any],
    logging_prefix: str = "global_seqlen",
    keep_minibatch: bool = False,
) -> Any:
    """Orders in place the rows of a DataProto, or the keys of a TransferQueue, padded first as verl does."""
    if getattr(self, "use_prefix_grouper", False):
        return stock(self, batch, metrics, logging_prefix, keep_minibatch)
    actor = self.config.actor_rollout_ref.actor
    _warn_of_norm(getattr(actor, "loss_agg_mode", ""), getattr(actor, "loss_scale_factor", None))
    num_ranks, has_rows = _dp_size(self), isinstance(batch, DataProto)
    if not has_rows:
        from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size

        multiple = self._get_required_batch_multiple(num_ranks)
        batch = upsample_batch_to_divisible_size(batch, multiple, self.tokenizer.eos_token_id)
    lengths = row_lengths(batch) if has_rows else np.array([tag["seq_len"] for tag in batch.tags], dtype=np.int64)
    if lengths is None:
        raise BalanceError("a batch is balanced by its attention_mask: it has none.")
    minibatch_rows = int(actor.ppo_mini_batch_size) * int(self.config.actor_rollout_ref.rollout.n)
    ranks = order_rows(lengths, num_ranks=num_ranks, cost_model=cost_model, minibatch_rows=minibatch_rows)
    parts = [rows.tolist() for rows in ranks]
    metrics.update(log_seqlen_unbalance(seqlen_list=lengths.tolist(), partitions=parts, prefix=logging_prefix))
    order = np.concatenate(ranks)
    batch.reorder(torch.from_numpy(order) if has_rows else order.tolist())
    return batch


@functools.cache
def _warn_of_norm(loss_agg_mode: str, loss_scale_factor: int | None) -> None:
    """Once: verl's other losses are normalised over the whole mini-batch."""
    if loss_agg_mode == "seq-mean-token-sum-norm" and loss_scale_factor is None:
        logger.warning(
            "actor.loss_agg_mode=%s divides by the longest response of each micro-batch, so that the loss depends on "
            "which rows share it: set actor.loss_scale_factor, such as data.max_response_length.",
            loss_agg_mode,
        )


def _dp_size(trainer: Any) -> int:
    """Data-parallel ranks of the actor, from the worker group's answer where it has asked its workers."""
    group = trainer.actor_rollout_wg
    return max(group._dispatch_info.get("actor") or group._query_dispatch_info("actor")) + 1


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
        for rows, part in zip(ranks, even_parts(minibatch, num_parts=num_ranks, equal_count=True), strict=True):
            rows.append(start + part[organ_pipe_order(minibatch[part][None, :])[0]])
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
