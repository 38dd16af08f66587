"""AReaL adapter: `install()` hooks it, in the controller and in the processes that train.

    from megatron_balance.adapters import areal
    areal.install(cost="flops", model="Qwen3-8B")

or, with nothing to edit, `python -m megatron_balance.adapters.areal --cost flops --model Qwen3-8B SCRIPT ...`.

The single controller deals trajectories out to its workers; each worker packs what it gets. Trainers with one process a
rank move trajectories between their ranks (`spmd.py`), which AReaL means to remove.

Invariants: signatures and results are AReaL's; an error on one rank raises on all.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron_balance.adapters.areal.batches import Batch, balance_batch, divide, item_lengths
from megatron_balance.adapters.areal.spmd import buffer_device, group_or_world, spmd_hooks
from megatron_balance.adapters.kit import Function, Hook, Installation
from megatron_balance.adapters.kit.ranks import agreed_microbatches
from megatron_balance.cost.model import CostModel
from megatron_balance.cost.rates import Model, resolve_cost
from megatron_balance.errors import BalanceError

__all__ = ["balance_batch", "install", "is_installed"]


@dataclass(frozen=True)
class ArealOptions:
    """The arguments of `install`, with the cost model of a sequence."""

    cost_model: CostModel
    single_rank_load: bool


installation: Installation[ArealOptions] = Installation(
    "areal", versions=("1.0.4",), remedy="pip install areal==1.0.4, or train without balancing"
)
is_installed = installation.is_installed


def install(
    *,
    cost: str | None = None,
    model: Model | None = None,
    ep_size: int = 1,
    single_rank_load: bool = False,
) -> Installation[ArealOptions]:
    """Hook AReaL in this process: in every rank and in the controller. Installing twice installs once.

    Args:
        cost: `flops`, `tokens` or the path of a seconds.json; by default flops where there is a model, else tokens.
        model: preset name, path of a Hugging Face config.json, or ModelShape.
        ep_size: expert-parallel ranks.
        single_rank_load: the first data-parallel rank rolls out the whole batch and the others receive their share
            (trainers that run as one process a rank; a single controller does it anyway).

    Raises:
        BalanceError: AReaL is missing, of another version, or a target has moved; or the adapter is installed with
            other options. Nothing is changed then.
    """
    cost_model = resolve_cost(cost, model=model, ep_size=ep_size)
    options = ArealOptions(cost_model, single_rank_load)
    return installation.install(options, lambda: _hooks(options))


def _hooks(options: ArealOptions) -> list[Hook]:
    """The table: the controller's dispatch, the micro-batches of each worker, and what ranks move among themselves."""
    return [
        Hook(
            target="areal.infra.controller.train_controller:_dispatch_tensors",
            parameters=("item_list", "dp_size", "group_size"),
            wrap=lambda _: functools.partial(_dispatch_tensors, options),
            reason="balances by our cost, accepts a number of items that is no multiple of the ranks",
        ),
        Hook(
            target="areal.utils.data:allocate_balanced_mbs_synced",
            parameters=("mb_spec", "lens", "group"),
            wrap=lambda _: functools.partial(_allocate_balanced_mbs_synced, options),
            reason="packs by our cost under the cap; an error of one rank raises on all, instead of a hang",
        ),
        Hook(
            target="areal.experimental.training_service.controller.controller:GatewayTrainController.__init__",
            wrap=_refused,
            reason="the proxy that deals trajectories out and the workers run a fixed command, without hooks",
            until="their command can be chosen",
        ),
        *spmd_hooks(options),
    ]


def _dispatch_tensors(options: ArealOptions, item_list: list[Batch], dp_size: int, group_size: int = 1) -> Any:
    """The items of each worker, and their positions."""
    lengths = [item_lengths(item) for item in item_list]
    cost_model = options.cost_model
    parts = divide(lengths, dp_size=dp_size, cost_model=cost_model, equal_count=True, unit_size=group_size)
    return [[item_list[index] for index in part] for part in parts], parts


def _allocate_balanced_mbs_synced(
    options: ArealOptions, mb_spec: Any, lens: list[int], group: dist.ProcessGroup | None = None
) -> list[list[int]]:
    """The rows of each micro-batch of this rank."""
    group = group_or_world(group) if dist.is_initialized() else None
    return agreed_microbatches(
        lens,
        max_tokens=mb_spec.max_tokens_per_mb,
        cost_model=options.cost_model,
        min_count=mb_spec.n_mbs or 1,
        multiple=mb_spec.n_mbs_divisor,
        flag="max_tokens_per_mb",
        group=group,
        device="cpu" if group is None else buffer_device(group),
    )


def _refused(init: Function) -> Function:
    @functools.wraps(init)
    def wrapper(self: Any, *positional: Any, **keywords: Any) -> None:
        raise BalanceError(
            "_version is v2: its processes start without hooks, so nothing would be balanced. Set _version: v1 in the "
            "configuration of each engine, or train without balancing."
        )

    return wrapper
