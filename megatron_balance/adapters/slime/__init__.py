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

from megatron_balance.adapters.kit import Adapter, Hook, check_not_started, find_version, hook_row
from megatron_balance.adapters.slime.plan import BalancedDpSchedule, MaskCopies, MaskedCopy, SlimeOptions
from megatron_balance.cost.resolve import Model

__all__ = ["SUPPORTED_VERSIONS", "BalancedDpSchedule", "MaskedCopy", "SlimeOptions", "install", "is_installed"]

SUPPORTED_VERSIONS = ("0.3",)
"""slime releases whose own tests pass with the adapter on (scripts/check upstream)."""

adapter: Adapter[SlimeOptions] = Adapter(
    "slime",
    versions=SUPPORTED_VERSIONS,
    remedy="check out one of these from github.com/THUDM/slime (the slime on PyPI is another project) or train without "
    "balancing",
    find_version=lambda: find_version("slime"),
)


def install(
    *,
    cost: str | None = None,
    model: Model | None = None,
    objective: str = "auto",
    algorithm: str = "auto",
) -> Adapter[SlimeOptions]:
    """Hook slime in this process, the driver. Installing twice with the same options installs once.

    Args:
        cost: see `SlimeOptions`, as are the others.
        model: model whose FLOPs are counted.
        objective: when ranks wait for one another.
        algorithm: how samples are placed.

    Raises:
        BalanceError: slime is missing, of another version, a target has moved, RolloutManager has been started
            already, or hooks for other options are in place; nothing is changed then.
    """
    options = SlimeOptions(cost=cost, model=model, objective=objective, algorithm=algorithm)

    def check() -> None:
        check_not_started(getattr(sys.modules.get("slime.ray.rollout"), "RolloutManager", None))

    return adapter.hook(options, lambda: hooks_for(options), check=check)


def is_installed() -> bool:
    """True if slime is hooked in this process."""
    return adapter.is_installed


def hooks_for(options: SlimeOptions) -> tuple[Hook, ...]:
    """The table for these options."""
    return (
        hook_row(
            "slime.utils.dp_schedule:build_dp_schedule",
            "args train_parallel_config total_lengths global_batch_size rollout_indices",
            also_in=("slime.ray.rollout",),
            wrap=lambda stock: BalancedDpSchedule(stock, options=options),
            why="RolloutManager asks it which rank runs which samples in which micro-batch",
            until="slime takes a schedule function by path, as it takes others",
        ),
        hook_row(
            "slime.observability.rollout_data_utils:tensorize_rollout_data_for_training",
            "rollout_data",
            also_in=("slime.ray.rollout",),
            wrap=MaskCopies,
            why="the last function before data is sent: copies that fill an empty micro-batch are masked there",
            until="slime's trainer runs an empty micro-batch",
        ),
    )
