"""verl adapter: batches, mini-batches and micro-batches balanced by this package's planner.

Three ways to install:

- `MEGATRON_BALANCE_VERL=1` in the environment of the driver and of every worker, read by the plug-in that verl loads
  (`plugin.py`);
- `VERL_USE_EXTERNAL_MODULES=megatron_balance.adapters.verl.plugin` as well, where pip did not install the package;
- `install()` in each process, before or after verl's trainers are imported.

Importing this package loads neither torch nor verl, and patches nothing.

verl's factor of tokens beside squared tokens, 24576, is that of one 7B model; here it comes from the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_balance.adapters.kit import Hook, Installation
from megatron_balance.cost.model import CostModel
from megatron_balance.cost.rates import Model, resolve_cost
from megatron_balance.errors import BalanceError, check_integer

if TYPE_CHECKING:
    from megatron_balance.adapters.verl.hooks import BalancedData

__all__ = ["balance_data_proto", "choose_cost", "install", "is_installed"]

VERL_FACTOR = 24576
"""verl's `calculate_workload`: `24576 * seqlen + seqlen**2` (verl 0.9.1, verl/utils/seqlen_balancing.py)."""

FACTOR_KEY = "mlp_workload_factor"
"""The key that the review of verl's `_balance_data_proto` asked for, in a `model_config`."""


installation: Installation[CostModel] = Installation(
    "verl", versions=("0.9", "0.10"), remedy="pip install verl==0.9.1, or train without MEGATRON_BALANCE_VERL"
)
is_installed = installation.is_installed


def choose_cost(model: Model | None = None, *, cost: str | None = None) -> CostModel:
    """The cost model of a verl run, by arguments of `install`; a BalanceError where one is not known."""
    if model is None and cost is None:
        model = {FACTOR_KEY: VERL_FACTOR}
    if isinstance(model, Mapping) and FACTOR_KEY in model:
        return CostModel(linear=check_integer(FACTOR_KEY, model[FACTOR_KEY], minimum=0), quadratic=1)
    return resolve_cost(cost, model=model)


def install(*, cost: str | None = None, model: Model | None = None) -> Installation[CostModel]:
    """Hook verl in this process. Installing twice with the same arguments installs once.

    Args:
        model: model whose FLOPs a row costs: a preset's name, a Hugging Face config.json's path or content, or
            `{"mlp_workload_factor": 24576}`. None for verl's own formula.
        cost: `flops`, `tokens` or the path of a seconds.json; by default flops where there is a model.

    Raises:
        BalanceError: verl is missing, of another version, or a target has moved; or the adapter is installed with
            other arguments. Nothing is changed then.
    """
    cost_model = choose_cost(model, cost=cost)
    return installation.install(cost_model, lambda: _table(cost_model))


def _table(cost_model: CostModel) -> list[Hook]:
    try:
        from megatron_balance.adapters.verl import hooks  # loads verl
    except ModuleNotFoundError as error:
        raise BalanceError(f"verl cannot be imported ({error}): pip install verl==0.9.1.") from error
    return [*hooks.functions(cost_model), *hooks.methods(cost_model)]


def balance_data_proto(obj: Any, chunks: int, *, model_config: Model | None = None) -> BalancedData:
    """Splits a DataProto into parts of equal size and nearly equal work.

    Args:
        obj: the rows; it is not changed. Where `chunks` does not divide them it is padded, as verl pads: by copies of
            the last row.
        chunks: parts to make.
        model_config: a model as in `install()`, or `{"mlp_workload_factor": ...}`; by default the installed
            one, else verl's own formula.

    Raises:
        BalanceError: the lengths of the rows are not known, or there are none.
    """
    from megatron_balance.adapters.verl.hooks import split_rows  # loads verl

    cost_model = installation.settings if model_config is None else None
    return split_rows(obj, chunks, cost_model=cost_model or choose_cost(model_config))
