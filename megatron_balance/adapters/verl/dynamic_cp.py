"""Plans verl's dynamic context parallelism.

verl's `DynamicCPScheduler` creates a scheduler of Megatron-Core's dev branch, calls its `get_groups_and_subsamples` for
a plan, checks that groups are neighbours and start at a multiple of their size, and gives each rank its micro-batches.
`BalancedScheduler` replaces that scheduler. `planner/rank_lists.py` has the contract of a plan.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_balance.adapters.verl.settings import Settings, while_active
from megatron_balance.cost.model import CostModel
from megatron_balance.hooking.patches import Function
from megatron_balance.planner import RankLists, plan_rank_lists
from megatron_balance.topology import Topology

EXCHANGE_PERCENT = {True: 1, False: 8}
"""Cost of receiving a token's keys and values, in percent of its linear cost: on one node (NVLink), and on several (one
400 Gb/s link per GPU). Computed for Qwen3-8B (`cost/communication.py`); used if the cost model has none."""


class BalancedScheduler:
    """Plans one batch that all ranks hold; verl creates an instance for every batch.

    Args:
        max_seqlen_per_dp_cp_rank: token cap of a rank.
        cp_size: context-parallel ranks.
        dp_size: data-parallel ranks.
        microbatch_group_size_per_vp_stage: micro-batches are a multiple of this; None for any number.
        cost_model: cost of a row.
        topology: the other ranks of a replica.
    """

    def __init__(
        self,
        max_seqlen_per_dp_cp_rank: int,
        cp_size: int,
        dp_size: int,
        microbatch_group_size_per_vp_stage: int | None,
        *,
        cost_model: CostModel,
        topology: Topology,
    ) -> None:
        self._cap = max_seqlen_per_dp_cp_rank
        self._cost_model = cost_model
        self._topology = replace(
            topology,
            dp_size=dp_size,
            cp_size=cp_size,
            dynamic_cp=True,
            microbatch_multiple=microbatch_group_size_per_vp_stage or 1,
        )

    def get_groups_and_subsamples(self, sample_id_seqlens: Sequence[tuple[int, int]]) -> RankLists:
        """Plan by `plan_rank_lists`; lengths need not be padded."""
        return plan_rank_lists(
            sample_id_seqlens, cost_model=self._cost_model, topology=self._topology, max_tokens_per_gpu=self._cap
        )


def choose_scheduler(stock: Function) -> Function:
    """Replaces `get_megatron_dynamic_cp_scheduler_cls`."""

    def balanced(settings: Settings) -> Callable[..., BalancedScheduler]:
        stock()  # raises if this Megatron cannot run the plan
        cost_model = with_exchange(settings.cost_model, on_one_node=_on_one_node())
        return functools.partial(BalancedScheduler, cost_model=cost_model, topology=_topology())

    return while_active(stock, balanced)


def with_exchange(cost_model: CostModel, *, on_one_node: bool) -> CostModel:
    """The cost model, with the default cost of receiving keys and values if it has none."""
    if cost_model.cp_exchange:
        return cost_model
    return replace(cost_model, cp_exchange=cost_model.linear * EXCHANGE_PERCENT[on_one_node] // 100)


def _on_one_node() -> bool:
    """True if one node holds all ranks; the same on every rank."""
    import torch.distributed as dist

    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    here = os.environ.get("RAY_LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or "1"
    return num_ranks <= int(here)


def _topology() -> Topology:
    """Stages, experts and tensor-parallel ranks of Megatron; verl pads for sequence parallelism."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return Topology(1)
    return Topology(
        1,
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        pp_size=parallel_state.get_pipeline_model_parallel_world_size(),
        ep_size=parallel_state.get_expert_model_parallel_world_size(),
        sequence_parallel=True,
    )
