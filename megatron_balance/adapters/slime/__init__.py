"""slime adapter: the schedule of a rollout batch (THUDM/slime) is made by `build_data_schedule`.

    from megatron_balance.adapters.slime import install
    patches = install()      # in the driver, before RolloutManager is started
    patches.undo()

slime's own flags turn balancing on: without `--balance-data` or `--balance-by-flops` its own function runs.

`RolloutManager` is a Ray actor. Its class is pickled by value when the first one starts, with the functions that its
module has bound by then: hooks installed in the driver before that reach the actor. Installing later is an error.
"""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Any

from megatron_balance.adapters.kit import Adapter, Hook
from megatron_balance.adapters.slime.plan import BalancedDpSchedule, MaskCopies, MaskedCopy
from megatron_balance.adapters.slime.settings import SlimeOptions
from megatron_balance.cost.resolve import Model
from megatron_balance.errors import BalanceError

__all__ = ["SUPPORTED_VERSIONS", "BalancedDpSchedule", "MaskedCopy", "SlimeOptions", "install", "is_installed"]

SUPPORTED_VERSIONS = ("0.3",)
"""slime releases whose own tests pass with the adapter on (scripts/check upstream)."""


def _find_version() -> str | None:
    try:
        return metadata.version("slime")
    except metadata.PackageNotFoundError:
        return None  # used from a source folder


adapter: Adapter[SlimeOptions] = Adapter(
    "slime",
    versions=SUPPORTED_VERSIONS,
    remedy="check out one of these from github.com/THUDM/slime (the slime on PyPI is another project) or train without "
    "balancing",
    find_version=_find_version,
)


def install(
    *,
    cost: str | None = None,
    model: Model | None = None,
    objective: str = "auto",
    algorithm: str = "auto",
    strict_cap: bool = True,
) -> Adapter[SlimeOptions]:
    """Hook slime in this process, the driver. Installing twice with the same options installs once.

    Args:
        cost: see `SlimeOptions`, as are the others.
        model: model whose FLOPs are counted.
        objective: when ranks wait for one another.
        algorithm: how samples are placed.
        strict_cap: hold the token cap whatever is balanced.

    Raises:
        BalanceError: slime is missing, of another version, a target has moved, RolloutManager has been started
            already, or hooks for other options are in place; nothing is changed then.
    """
    options = SlimeOptions(cost=cost, model=model, objective=objective, algorithm=algorithm, strict_cap=strict_cap)
    check = check_not_started("slime.ray.rollout")
    return adapter.hook(options, lambda: hooks_for(options), check=check)


def is_installed() -> bool:
    """True if slime is hooked in this process."""
    return adapter.is_installed


def hooks_for(options: SlimeOptions) -> tuple[Hook, ...]:
    """The table for these options."""
    return (
        Hook(
            target="slime.utils.dp_schedule:build_dp_schedule",
            bound_in=("slime.utils.dp_schedule", "slime.ray.rollout"),
            parameters=("args", "train_parallel_config", "total_lengths", "global_batch_size", "rollout_indices"),
            wrap=lambda stock: BalancedDpSchedule(stock, options=options),
            why="RolloutManager asks it which rank runs which samples in which micro-batch",
            until="slime takes a schedule function by path, as it takes others",
        ),
        Hook(
            target="slime.observability.rollout_data_utils:tensorize_rollout_data_for_training",
            bound_in=("slime.observability.rollout_data_utils", "slime.ray.rollout"),
            parameters=("rollout_data",),
            wrap=MaskCopies,
            why="the last function before data is sent: copies that fill an empty micro-batch are masked there",
            until="slime's trainer runs an empty micro-batch",
        ),
    )


def check_not_started(module: str) -> Any:
    """A function that raises where Ray has pickled the module's RolloutManager, in this or an earlier connection."""

    def check() -> None:
        manager: Any = getattr(sys.modules.get(module), "RolloutManager", None)
        ray_metadata = getattr(manager, "__ray_metadata__", None)
        if getattr(ray_metadata, "last_export_cluster_and_job", None) is not None:
            raise BalanceError("RolloutManager has been started already: install before create_rollout_manager().")

    return check
