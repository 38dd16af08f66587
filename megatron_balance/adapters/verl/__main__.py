"""Runs verl's driver with the hooks installed, there and in the workers that inherit its environment.

    python -m megatron_balance.adapters.verl --model /models/Qwen3-8B -m verl.trainer.main_ppo ARGS

Workers on other nodes need `MEGATRON_BALANCE_VERL` in Ray's environment (docs/adapters.md).
"""

import os

from megatron_balance.adapters import verl
from megatron_balance.adapters.kit import Installation, launch
from megatron_balance.cost.model import CostModel


def install(*, model: str | None = None, cost: str | None = None) -> Installation[CostModel]:
    """Hook this process, and have the plug-in hook those that it starts."""
    options = {"model": model, "cost": cost}
    words = [f"{name}={value}" for name, value in options.items() if value is not None]
    os.environ["MEGATRON_BALANCE_VERL"] = " ".join(words) or "1"
    return verl.install(model=model, cost=cost)


if __name__ == "__main__":
    launch("megatron_balance.adapters.verl.__main__", command="megatron_balance.adapters.verl")
