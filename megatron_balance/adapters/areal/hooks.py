"""The hooks in AReaL, in a checked table, and `install()`.

Invariants: nothing is patched before `install()`; it patches everything or nothing and can be undone; an untested
version of AReaL is refused, on every rank before training.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import Any

import torch.distributed as dist

from megatron_balance.adapters.areal.coordinator import buffer_device, group_or_world, redistribution_hooks
from megatron_balance.adapters.areal.dispatch import make_dispatch
from megatron_balance.adapters.areal.plan import plan_agreed_microbatches
from megatron_balance.adapters.areal.settings import ArealOptions
from megatron_balance.adapters.areal.single_rank import MAX_WAIT
from megatron_balance.adapters.areal.trainer import single_rank_hooks
from megatron_balance.adapters.areal.trajectories import with_token_axis_cut
from megatron_balance.adapters.processor_images import counted_encoder
from megatron_balance.cost.resolve import Model, resolve_cost
from megatron_balance.errors import BalanceError
from megatron_balance.hooking.installation import Installation, check_version
from megatron_balance.hooking.patches import Hook
from megatron_balance.hooking.patches import install as install_hooks

SUPPORTED_VERSIONS = ("1.0.4",)


installation: Installation[ArealOptions] = Installation("AReaL")


def install(
    *,
    cost: str | None = None,
    model: Model | None = None,
    ep_size: int = 1,
    single_rank_load: bool = False,
    gather_all: bool = False,
    max_wait: timedelta = MAX_WAIT,
) -> Installation[ArealOptions]:
    """Hook AReaL in this process: in every rank and in the controller. Installing twice installs once.

    Args:
        cost: `tokens` or `flops`; by default flops where there is a model, else tokens.
        model: preset name, path of a Hugging Face config.json, or ModelShape.
        ep_size: expert-parallel ranks.
        single_rank_load: the first data-parallel rank rolls out the whole batch and the others receive their share
            (trainers that run as one process a rank; a single controller does it anyway).
        gather_all: fill `RedistributedData.all_data` on every rank, as AReaL does. Nothing in AReaL reads it, and it
            takes as much memory as the trajectories of all ranks, so by default entries of other ranks are None.
        max_wait: how long ranks wait for the one that rolls out.

    Raises:
        BalanceError: AReaL is missing, of another version, or a target has moved; or the adapter is installed with
            other options. Nothing is changed then.
    """
    cost_model = resolve_cost(cost, model=model, ep_size=ep_size)
    options = ArealOptions(
        cost_model=cost_model,
        ep_size=ep_size,
        encoder=counted_encoder(model, cost_model=cost_model),
        single_rank_load=single_rank_load,
        gather_all=gather_all,
        max_wait=max_wait,
    )
    return installation.install(
        options, hook=lambda: install_hooks(_hooks(options), version=f"areal {_supported_version()}")
    )


def is_installed() -> bool:
    """True if AReaL is hooked in this process."""
    return installation.settings is not None


def _supported_version() -> str:
    try:
        version = installed_version("areal")
    except PackageNotFoundError as error:
        raise BalanceError(f"AReaL is not installed: pip install areal=={SUPPORTED_VERSIONS[-1]}.") from error
    remedy = f"install areal=={SUPPORTED_VERSIONS[-1]}, or train without it"
    return check_version(version, system="areal", supported=SUPPORTED_VERSIONS, remedy=remedy)


def _hooks(options: ArealOptions) -> tuple[Hook, ...]:
    hooks = (
        *redistribution_hooks(
            cost_model=options.cost_model,
            ep_size=options.ep_size,
            encoder=options.encoder,
            gather_all=options.gather_all,
        ),
        Hook(
            target="areal.infra.controller.train_controller:_dispatch_tensors",
            bound_in=(
                "areal.infra.controller.train_controller",
                "areal.experimental.training_service.data_proxy.dispatcher",
            ),
            parameters=("item_list", "dp_size", "group_size"),
            wrap=lambda _: make_dispatch(
                cost_model=options.cost_model, ep_size=options.ep_size, encoder=options.encoder
            ),
            why="balances by our cost, accepts a number of items that is no multiple of the ranks",
            until="AReaL's controller takes a partition function",
        ),
        Hook(
            target="areal.utils.data:allocate_balanced_mbs_synced",
            bound_in=("areal.utils.data",),
            parameters=("mb_spec", "lens", "group"),
            wrap=lambda _: _allocate_balanced_mbs_synced(options),
            why="packs by our cost under the cap; an error of one rank raises on all, instead of a hang",
            until="AReaL's ranks agree on failure before one raises",
        ),
        Hook(
            target="areal.utils.data:split_and_unpad_tensor",
            bound_in=("areal.utils.data", "areal.infra.dist_rollout"),
            parameters=("result", "n_trajs", "traj_group_sizes", "traj_seqlens"),
            wrap=with_token_axis_cut,
            why="it cuts the last axis, which is not the token axis of tensors with three",
            until="AReaL cuts the token axis",
        ),
    )
    return (*hooks, *single_rank_hooks(max_wait=options.max_wait)) if options.single_rank_load else hooks


def _allocate_balanced_mbs_synced(options: ArealOptions) -> Callable[..., list[list[int]]]:
    def allocate_balanced_mbs_synced(
        mb_spec: Any, lens: list[int], group: dist.ProcessGroup | None = None
    ) -> list[list[int]]:
        group = group_or_world(group) if dist.is_initialized() else None
        return plan_agreed_microbatches(
            lens,
            max_tokens=mb_spec.max_tokens_per_mb,
            min_microbatches=mb_spec.n_mbs or 1,
            divisor=mb_spec.n_mbs_divisor,
            cost_model=options.cost_model,
            group=group,
            device="cpu" if group is None else buffer_device(group),
        )

    return allocate_balanced_mbs_synced
