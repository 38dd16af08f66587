"""Replaces the functions of `verl.utils.seqlen_balancing` while the adapter is installed."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_balance.adapters.verl.plan import balanced_partitions, group_balanced_partitions
from megatron_balance.adapters.verl.settings import Settings, while_active
from megatron_balance.adapters.verl.workload import tensor_workloads
from megatron_balance.errors import BalanceError
from megatron_balance.hooking.patches import Function
from megatron_balance.planner import Images


def count_workload(stock: Function) -> Function:
    """`calculate_workload` by the settings' cost model."""

    def balanced(settings: Settings, seqlen_list: Any) -> Any:
        return tensor_workloads(seqlen_list, cost_model=settings.cost_model)

    return while_active(stock, balanced)


def partition(stock: Function) -> Function:
    """`get_seqlen_balanced_partitions`, also where ranks do not divide the rows."""

    def balanced(_: Settings, seqlen_list: Any, k_partitions: int, equal_size: bool) -> list[list[int]]:
        return balanced_partitions(seqlen_list, num_parts=k_partitions, equal_size=equal_size)

    return while_active(stock, balanced)


def partition_groups(stock: Function) -> Function:
    """`get_group_balanced_partitions`: rows of one uid stay together."""

    def balanced(settings: Settings, seqlen_list: Any, uid_list: Any, k_partitions: int) -> list[list[int]]:
        lengths = np.asarray(seqlen_list, dtype=np.int64)
        return group_balanced_partitions(lengths, uids=uid_list, num_parts=k_partitions, cost_model=settings.cost_model)

    return while_active(stock, balanced)


def pack_micro_batches(stock: Function) -> Function:
    """`rearrange_micro_batches`: the fewest micro-batches under the cap, of nearly equal work."""
    from verl.utils.device import get_device_name

    from megatron_balance.adapters.verl.data_proto import row_images, row_lengths, select_rows
    from megatron_balance.adapters.verl.micro_batches import MicroBatchLimits, plan_micro_batches

    def balanced(
        settings: Settings,
        batch: Any,
        max_token_len: int,
        dp_group: Any = None,
        num_batches_divided_by: int | None = None,
        same_micro_num_in_dp: bool = True,
        min_num_micro_batch: int | None = None,
        use_dynamic_bsz_balance: bool = True,
        force_group_size: int = 1,
    ) -> tuple[list[Any], list[list[int]]]:
        known = row_lengths(batch)
        lengths = np.zeros(0, dtype=np.int64) if known is None else known
        images, problem = None, None
        if settings.encoder is not None:
            # Ranks without an image send zeros, since all gather the same values of a row.
            images = Images(np.zeros((lengths.size, 2), dtype=np.int64))
            try:
                images = row_images(batch, encoder=settings.encoder) or images
            except BalanceError as error:
                problem = str(error)  # raised below, on all ranks
        together = dist.is_initialized() and same_micro_num_in_dp and dp_group is not None
        planned = plan_micro_batches(
            lengths,
            limits=MicroBatchLimits(
                int(max_token_len),
                multiple=num_batches_divided_by or 1,
                min_num_micro_batch=min_num_micro_batch or 1,
                force_group_size=force_group_size,
            ),
            cost_model=settings.cost_model,
            images=images,
            problem=problem,
            mountain=use_dynamic_bsz_balance,
            group=dp_group if together else None,
            device=get_device_name(),
        )
        return [select_rows(batch, np.array(rows, dtype=np.int64)) for rows in planned], planned

    return while_active(stock, balanced)
