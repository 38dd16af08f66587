"""The hooks in slime, in a checked table.

`RolloutManager` is a Ray actor. Its class is pickled by value when the first one starts, with the functions that its
module has bound by then: hooks installed in the driver before that reach the actor. Installing later is an error.
"""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Any

from megatron_balance.adapters.slime.masked_copies import MaskCopies
from megatron_balance.adapters.slime.plan import BalancedDpSchedule
from megatron_balance.adapters.slime.settings import SlimeOptions
from megatron_balance.cost.resolve import Model
from megatron_balance.errors import BalanceError
from megatron_balance.hooking.installation import Installation, check_version
from megatron_balance.hooking.patches import Hook, Patches
from megatron_balance.hooking.patches import install as install_hooks

SUPPORTED_VERSIONS = ("0.3",)
"""slime releases whose own tests pass with the adapter on (scripts/check upstream)."""


def hooks_for(options: SlimeOptions) -> tuple[Hook, ...]:
    """The table for these options."""
    return (
        Hook(
            target="slime.utils.dp_schedule:build_dp_schedule",
            bound_in=("slime.utils.dp_schedule", "slime.ray.rollout"),
            parameters=(
                "args",
                "train_parallel_config",
                "total_lengths",
                "global_batch_size",
                "rollout_indices",
            ),
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


installation: Installation[SlimeOptions] = Installation("slime")


def install(
    *,
    cost: str | None = None,
    model: Model | None = None,
    objective: str = "auto",
    algorithm: str = "auto",
    strict_cap: bool = True,
) -> Installation[SlimeOptions]:
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
    return installation.install(options, hook=lambda: _hook_driver(options))


def is_installed() -> bool:
    """True if slime is hooked in this process."""
    return installation.settings is not None


def _hook_driver(options: SlimeOptions) -> Patches:
    version = slime_version()
    if version is not None:
        remedy = (
            "check out one of these from github.com/THUDM/slime (the slime on PyPI is another project) or train "
            "without balancing"
        )
        check_version(version, system="slime", supported=SUPPORTED_VERSIONS, remedy=remedy)
    patches = install_hooks(hooks_for(options), version=f"slime {version or '(of a source folder)'}")
    if _manager_is_started():
        patches.undo()
        raise BalanceError("RolloutManager has been started already: install before create_rollout_manager().")
    return patches


def slime_version() -> str | None:
    """The installed version; None where slime is used from a source folder."""
    try:
        return importlib.metadata.version("slime")
    except importlib.metadata.PackageNotFoundError:
        return None


def _manager_is_started() -> bool:
    """True if Ray has pickled RolloutManager's class, in this or an earlier connection."""
    manager: Any = getattr(sys.modules.get("slime.ray.rollout"), "RolloutManager", None)
    metadata = getattr(manager, "__ray_metadata__", None)
    return getattr(metadata, "last_export_cluster_and_job", None) is not None
