"""AReaL adapter: `install()` hooks it; other functions are for scripts that call them directly.

    from megatron_balance.adapters import areal
    areal.install(cost="flops", model="Qwen3-8B")

or, with nothing to edit, `python -m megatron_balance.adapters.areal --cost flops --model Qwen3-8B SCRIPT ...`.

Only data-parallel heads redistribute after a rollout; the other ranks of a replica wait for them in a barrier. So
errors of the heads are gathered on all ranks before that barrier.

Invariants: signatures and results are AReaL's; an error on one rank, head or not, raises on all.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_balance.adapters.areal.single_rank import (
    MAX_WAIT_HOURS,
    SingleRankLoad,
    endless,
    scaled_for_one_rank,
    single_rank_hooks,
)
from megatron_balance.adapters.areal.trajectories import balance_batch, distributed_batch, make_dispatch, redistribute
from megatron_balance.adapters.kit import Adapter, Function, Hook
from megatron_balance.adapters.kit.ranks import agreed_microbatches
from megatron_balance.cost.model import CostModel
from megatron_balance.cost.rates import Model, resolve_cost
from megatron_balance.errors import BalanceError
from megatron_balance.runtime import gather_lengths

__all__ = [
    "SingleRankLoad",
    "balance_batch",
    "distributed_batch",
    "endless",
    "install",
    "is_installed",
    "redistribute",
    "scaled_for_one_rank",
]

_ROLLOUT = "areal.infra.dist_rollout"
_CONTROLLER = "areal.infra.controller.train_controller"


@dataclass(frozen=True, kw_only=True)
class ArealOptions:
    """The arguments of `install`, with the cost model of a row."""

    cost_model: CostModel
    single_rank_load: bool
    max_wait_hours: float


adapter: Adapter[ArealOptions] = Adapter(
    "areal", versions=("1.0.4",), remedy="pip install areal==1.0.4, or train without balancing"
)
is_installed = adapter.is_installed


def install(
    *,
    cost: str | None = None,
    model: Model | None = None,
    ep_size: int = 1,
    single_rank_load: bool = False,
    max_wait_hours: float = MAX_WAIT_HOURS,
) -> Adapter[ArealOptions]:
    """Hook AReaL in this process: in every rank and in the controller. Installing twice installs once.

    Args:
        cost: `flops`, `tokens` or the path of a seconds.json; by default flops where there is a model, else tokens.
        model: preset name, path of a Hugging Face config.json, or ModelShape.
        ep_size: expert-parallel ranks.
        single_rank_load: the first data-parallel rank rolls out the whole batch and the others receive their share
            (trainers that run as one process a rank; a single controller does it anyway).
        max_wait_hours: how long ranks wait for the one that rolls out.

    Raises:
        BalanceError: AReaL is missing, of another version, or a target has moved; or the adapter is installed with
            other options. Nothing is changed then.
    """
    cost_model = resolve_cost(cost, model=model, ep_size=ep_size)
    options = ArealOptions(cost_model=cost_model, single_rank_load=single_rank_load, max_wait_hours=max_wait_hours)
    return adapter.hook(options, lambda: _hooks(options))


def _hooks(options: ArealOptions) -> tuple[Hook, ...]:
    """The table: the redistribution, the controller's dispatch, micro-batches, and `single_rank_load`."""

    def redistribute_trajectories(
        trajectories: list[dict[str, Any]], group: dist.ProcessGroup | None = None, packing_algorithm: str = "ffd"
    ) -> Any:
        # packing_algorithm names one of AReaL's algorithms, which the planner replaces.
        from areal.infra.dist_rollout import RedistributedData

        if isinstance(trajectories, RedistributedData):
            return trajectories  # by `wrapper` below
        group = _group_or_world(group)
        moved = redistribute(trajectories, group=group, cost_model=options.cost_model, device=_buffer_device(group))
        # Nothing in AReaL reads what other ranks have, and it takes as much memory as the trajectories of all ranks.
        all_data: list[Any] = [None] * sum(map(len, moved.ids_per_rank))
        for index, trajectory in zip(moved.ids_per_rank[group.rank()], moved.trajectories, strict=True):
            all_data[index] = trajectory
        return RedistributedData(
            all_data=all_data, data=moved.trajectories, rank=group.rank(), group_indices=moved.ids_per_rank
        )

    def with_failures_shared(method: Function) -> Function:
        @functools.wraps(method)
        def wrapper(self: Any, trajectories: Any) -> Any:
            problem = None
            try:
                if trajectories is not None:
                    trajectories = redistribute_trajectories(trajectories, self.train_engine.data_parallel_group)
            except BalanceError as error:
                problem = str(error)
            gather_lengths([], group=_group_or_world(self.train_engine.cpu_group), problem=problem)
            return method(self, trajectories)

        return wrapper

    def allocate_balanced_mbs_synced(
        mb_spec: Any, lens: list[int], group: dist.ProcessGroup | None = None
    ) -> list[list[int]]:
        group = _group_or_world(group) if dist.is_initialized() else None
        return agreed_microbatches(
            lens,
            max_tokens=mb_spec.max_tokens_per_mb,
            cost_model=options.cost_model,
            least=mb_spec.n_mbs or 1,
            multiple=mb_spec.n_mbs_divisor,
            flag="max_tokens_per_mb",
            group=group,
            device="cpu" if group is None else _buffer_device(group),
        )

    return (
        Hook(
            target=f"{_ROLLOUT}:redistribute_trajectories",
            parameters=("trajectories", "group", "packing_algorithm"),
            wrap=lambda _: redistribute_trajectories,
            why="balances by our cost, moves each trajectory once, accepts any number of trajectories a rank",
            until="AReaL's redistribution takes an allocation function and lists of different lengths",
        ),
        Hook(
            target=f"{_ROLLOUT}:DistRolloutCoordinator._broadcast_and_redistribute_trajectories",
            parameters=("self", "trajectories"),
            wrap=with_failures_shared,
            why="an error of a data-parallel head raises on the ranks that wait for it too",
            until="AReaL's ranks agree on failure before one raises",
        ),
        Hook(
            target=f"{_CONTROLLER}:_dispatch_tensors",
            parameters=("item_list", "dp_size", "group_size"),
            wrap=lambda _: make_dispatch(options.cost_model),
            why="balances by our cost, accepts a number of items that is no multiple of the ranks",
            until="AReaL's controller takes a partition function",
            bound_in=(_CONTROLLER, "areal.experimental.training_service.data_proxy.dispatcher"),
        ),
        Hook(
            target="areal.utils.data:allocate_balanced_mbs_synced",
            parameters=("mb_spec", "lens", "group"),
            wrap=lambda _: allocate_balanced_mbs_synced,
            why="packs by our cost under the cap; an error of one rank raises on all, instead of a hang",
            until="AReaL's ranks agree on failure before one raises",
        ),
        *(single_rank_hooks(options.max_wait_hours) if options.single_rank_load else ()),
    )


def _group_or_world(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, or all ranks, which AReaL means by None."""
    found = dist.group.WORLD if group is None else group
    assert found is not None
    return found


def _buffer_device(group: dist.ProcessGroup) -> torch.device | str:
    """The device of the buffers of the group's collectives."""
    from areal.infra.platforms import current_platform

    return "cpu" if "gloo" in dist.get_backend(group) else current_platform.current_device()
