"""AReaL adapter: `install()` hooks it; other functions are for scripts that call them directly.

    from megatron_balance.adapters import areal
    areal.install(cost="flops", model="Qwen3-8B")

or, with nothing to edit, `python -m megatron_balance.adapters.areal --cost flops --model Qwen3-8B SCRIPT ...`.
"""

from __future__ import annotations

from datetime import timedelta

from megatron_balance.adapters.areal.hooks import ArealOptions, hooks_for
from megatron_balance.adapters.areal.single_rank import MAX_WAIT, SingleRankLoad, endless, scaled_for_one_rank
from megatron_balance.adapters.areal.trajectories import balance_batch, distributed_batch, redistribute
from megatron_balance.adapters.kit import Adapter, find_version
from megatron_balance.cost.resolve import Model, resolve_cost

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

SUPPORTED_VERSIONS = ("1.0.4",)

adapter: Adapter[ArealOptions] = Adapter(
    "areal",
    versions=SUPPORTED_VERSIONS,
    remedy=f"install areal=={SUPPORTED_VERSIONS[-1]}, or train without it",
    find_version=lambda: find_version(
        "areal", missing=f"AReaL is not installed: pip install areal=={SUPPORTED_VERSIONS[-1]}."
    ),
)


def install(
    *,
    cost: str | None = None,
    model: Model | None = None,
    ep_size: int = 1,
    single_rank_load: bool = False,
    max_wait: timedelta = MAX_WAIT,
) -> Adapter[ArealOptions]:
    """Hook AReaL in this process: in every rank and in the controller. Installing twice installs once.

    Args:
        cost: `tokens` or `flops`; by default flops where there is a model, else tokens.
        model: preset name, path of a Hugging Face config.json, or ModelShape.
        ep_size: expert-parallel ranks.
        single_rank_load: the first data-parallel rank rolls out the whole batch and the others receive their share
            (trainers that run as one process a rank; a single controller does it anyway).
        max_wait: how long ranks wait for the one that rolls out.

    Raises:
        BalanceError: AReaL is missing, of another version, or a target has moved; or the adapter is installed with
            other options. Nothing is changed then.
    """
    options = ArealOptions(
        resolve_cost(cost, model=model, ep_size=ep_size), single_rank_load=single_rank_load, max_wait=max_wait
    )
    return adapter.hook(options, lambda: hooks_for(options))


def is_installed() -> bool:
    """True if AReaL is hooked in this process."""
    return adapter.is_installed
