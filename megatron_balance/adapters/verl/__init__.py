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

from megatron_balance.adapters.verl.settings import installation

if TYPE_CHECKING:
    from megatron_balance.adapters.verl.data_proto import BalancedData
    from megatron_balance.adapters.verl.settings import Settings
    from megatron_balance.adapters.verl.workload import Model
    from megatron_balance.hooking.installation import Installation

__all__ = ["balance_data_proto", "install", "is_installed"]


def install(
    model: Model | None = None,
    *,
    cost: str | None = None,
    keep_minibatch: bool = True,
    dispatch: bool | tuple[str, ...] = False,
) -> Installation[Settings]:
    """Hook verl in this process; see `megatron_balance.adapters.verl.hooks`."""
    from megatron_balance.adapters.verl import hooks  # loads verl

    return hooks.install(model, cost=cost, keep_minibatch=keep_minibatch, dispatch=dispatch)


def is_installed() -> bool:
    """True if verl is balanced in this process."""
    return installation.settings is not None


def balance_data_proto(obj: Any, chunks: int, *, model_config: Model | None = None) -> BalancedData:
    """Split a DataProto into parts of equal work; see `megatron_balance.adapters.verl.data_proto`."""
    from megatron_balance.adapters.verl import data_proto  # loads verl

    return data_proto.balance_data_proto(obj, chunks, model_config=model_config)
