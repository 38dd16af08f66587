"""verl adapter: batches, mini-batches and micro-batches balanced by this package's planner.

Three ways to install:

- `MEGATRON_BALANCE_VERL=1` in the environment of the driver and of every worker, read by the plug-in that verl loads
  (`plugin.py`);
- `VERL_USE_EXTERNAL_MODULES=megatron_balance.adapters.verl.plugin` as well, where pip did not install the package;
- `install()` in each process, before or after verl's trainers are imported.

Importing this package loads neither torch nor verl, and patches nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_balance.adapters.kit import Adapter
from megatron_balance.adapters.verl.settings import Model, Settings, adapter, choose_cost

if TYPE_CHECKING:
    from megatron_balance.adapters.verl.rows import BalancedData

__all__ = ["balance_data_proto", "choose_cost", "install", "is_installed"]


def install(
    model: Model | None = None,
    *,
    cost: str | None = None,
    dispatch: bool | tuple[str, ...] = False,
) -> Adapter[Settings]:
    """Hook verl in this process. Installing twice with the same arguments installs once.

    Args:
        model: model whose FLOPs a row costs: a preset's name, a Hugging Face config.json's path, content or
            `PretrainedConfig`, or `{"mlp_workload_factor": 24576}`. None for verl's own formula.
        cost: `flops`, `tokens` or the path of a seconds.json; by default flops where there is a model.
        dispatch: balance the calls of worker groups as well: all of them, or those of the methods named.

    Raises:
        BalanceError: verl is missing, of another version, or a target has moved; or the adapter is installed with
            other arguments. Nothing is changed then.
    """
    from megatron_balance.adapters.verl import hooks  # loads verl

    settings = Settings(choose_cost(model, cost=cost), dispatch=dispatch)
    return adapter.hook(settings, lambda: (*hooks.hooks(), *hooks.trainer_hooks()))


def is_installed() -> bool:
    """True if verl is balanced in this process."""
    return adapter.is_installed


def balance_data_proto(obj: Any, chunks: int, *, model_config: Model | None = None) -> BalancedData:
    """Split a DataProto into parts of equal work; see `megatron_balance.adapters.verl.rows`."""
    from megatron_balance.adapters.verl import rows  # loads verl

    return rows.balance_data_proto(obj, chunks, model_config=model_config)
