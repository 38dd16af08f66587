"""miles adapter (radixark/miles, a fork of slime): slime's adapter under miles's names.

    python -m megatron_balance.adapters.miles train.py ARGS      # in place of `python train.py ARGS`

`RolloutManager` is a Ray actor. The functions of miles that make the schedule are pickled by name, so the actor would
import miles's own. What is hooked in the driver is the one function that the actor's class has bound; in the actor it
hooks the schedule before it runs. miles schedules locally with several LoRA adapters in a batch and with images: such
batches stay stock.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

from megatron_balance.adapters.kit import Hook, Installation, check_not_started, launch
from megatron_balance.adapters.slime import SlimeOptions, schedule_hook
from megatron_balance.cost.rates import Model

_CONVERSION = "miles.ray.rollout.train_data_conversion"
_MANAGER = "miles.ray.rollout.rollout_manager"
_REMEDY = "check out the commit of docs/adapters.md from github.com/radixark/miles, or train without balancing"

driver: Installation[SlimeOptions] = Installation("miles", versions=("0.1",), remedy=_REMEDY)
"""The hook of the driver."""

actor: Installation[SlimeOptions] = Installation("miles", remedy=_REMEDY)
"""The hook of the process that makes the schedule."""

is_installed = driver.is_installed


def install(
    *, cost: str | None = None, model: Model | None = None, objective: str = "auto"
) -> Installation[SlimeOptions]:
    """Hook miles in this process, the driver, before `create_rollout_manager()`; arguments as of slime's `install`.

    Raises:
        BalanceError: miles is missing, of another version, a target has moved, or RolloutManager runs already.
    """
    options = SlimeOptions(cost=cost, model=model, objective=objective)
    return driver.install(options, lambda: _hooks_of_driver(options))


def _hooks_of_driver(options: SlimeOptions) -> list[Hook]:
    check_not_started(getattr(sys.modules.get(_MANAGER), "RolloutManager", None))
    return [
        Hook(  # bound by the actor's class alone: in its home the function stays miles's
            target=f"{_CONVERSION}:split_train_data_by_dp",
            bound_in=(_MANAGER,),
            parameters=("args", "data", "train_parallel_config"),
            wrap=lambda _: functools.partial(_split, options),
            reason="the function that the actor's class has bound, which reaches the actor with it",
        )
    ]


def _split(options: SlimeOptions, args: Any, data: dict[str, Any], train_parallel_config: dict[str, Any] | None) -> Any:
    """Hooks the schedule in this process, the actor's, then calls miles's function, which asks for it."""
    actor.install(options, lambda: [schedule_hook(options, "miles.utils.dp_schedule", user=_CONVERSION)])
    return importlib.import_module(_CONVERSION).split_train_data_by_dp(args, data, train_parallel_config)


if __name__ == "__main__":
    launch("megatron_balance.adapters.miles")
