"""AReaL adapter: `install()` hooks it; other functions are for scripts that call them directly.

    from megatron_balance.adapters import areal
    areal.install(cost="flops", model="Qwen3-8B")

or, with nothing to edit, `python -m megatron_balance.adapters.areal --cost flops --model Qwen3-8B SCRIPT ...`.
"""

from __future__ import annotations

from megatron_balance.adapters.areal.hooks import ArealOptions, hooks_for
from megatron_balance.adapters.areal.single_rank import (
    MAX_WAIT_HOURS,
    SingleRankLoad,
    endless,
    scaled_for_one_rank,
)
from megatron_balance.adapters.areal.trajectories import balance_batch, distributed_batch, redistribute
from megatron_balance.adapters.kit import Adapter
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
        cost: `tokens` or `flops`; by default flops where there is a model, else tokens.
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
    options = ArealOptions(cost_model, single_rank_load=single_rank_load, max_wait_hours=max_wait_hours)
    return adapter.hook(options, lambda: hooks_for(options))
