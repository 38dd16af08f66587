"""The hooks in TorchSpec's controller: a checked table for each approach."""

from __future__ import annotations

import functools
from collections.abc import Callable

from megatron_balance.adapters.torchspec.actor_class import check_not_started, torchspec_version
from megatron_balance.adapters.torchspec.dispatch import (
    with_delays_reported,
    with_presorted_data,
    with_ranks_by_length,
    with_window,
)
from megatron_balance.adapters.torchspec.settings import Settings
from megatron_balance.hooking.installation import Installation
from megatron_balance.hooking.patches import Function, Hook, Patches
from megatron_balance.hooking.patches import install as install_hooks

_CONTROLLER = "megatron_balance.adapters.torchspec.actor_class:AsyncTrainingController"

installation: Installation[Settings] = Installation("TorchSpec")


def install(
    approach: str = "A", *, window: int = 2, cost: str = "padded", bucket_batches: int = 1
) -> Installation[Settings]:
    """Balance the ranks of TorchSpec's trainer. Call it in the driver, before the controller starts.

    Installing twice installs once.

    Args:
        approach: `A`, `B` or `C`, described in the package's docstring.
        window: dispatches' worth of samples to choose among in `B` and `C`: 2, 3 or 4; in `C` also 1, for none.
        cost: `padded`, as TorchSpec trains, or `tokens`, for a trainer that packs.
        bucket_batches: dispatches of a bucket of similar lengths in `C`.

    Raises:
        BalanceError: an argument is not one of these; TorchSpec is missing, of another version, or not as expected; a
            controller has started; other settings are installed. Nothing is changed then.
    """
    settings = Settings(approach, window=window, cost=cost, bucket_batches=bucket_batches)
    return installation.install(settings, hook=lambda: _hook_driver(settings))


def is_installed() -> bool:
    """True if `install` has hooked the controller in this process."""
    return installation.settings is not None


def _hook_driver(settings: Settings) -> Patches:
    version = torchspec_version()
    check_not_started()
    return install_hooks(_hooks(settings), version=f"torchspec {version}")


def _hooks(settings: Settings) -> tuple[Hook, ...]:
    """The table of one approach."""
    hooks = [
        _hook(
            "_partition_results",
            parameters=("results",),
            wrap=functools.partial(with_ranks_by_length, settings=settings),
            why="gives the samples of a dispatch to ranks in turn, whatever their lengths",
            until="TorchSpec assigns by padded length (later commits assign longest first, by tokens)",
        )
    ]
    if settings.chooses:
        hooks += [
            _hook(
                "try_dispatch_batch",
                parameters=(),
                wrap=functools.partial(with_window, settings=settings),
                why="takes the oldest samples of the pool, whatever their lengths",
                until="TorchSpec chooses among the samples of its pool",
            ),
            _hook(
                "get_status",
                parameters=(),
                wrap=functools.partial(with_delays_reported, settings=settings),
                why="the delay that choosing costs is reported with the rest of the status",
                until="the hook of try_dispatch_batch goes",
            ),
        ]
    if settings.approach == "C":
        hooks.append(
            _hook(
                "_prepare_dataset",
                parameters=("skip",),
                wrap=functools.partial(with_presorted_data, settings=settings),
                why="orders the prompts of an epoch, at random",
                until="TorchSpec buckets by dispatch_batch_size (later commits have length_group_size)",
            )
        )
    return tuple(hooks)


def _hook(
    method: str, *, parameters: tuple[str, ...], wrap: Callable[[Function], Function], why: str, until: str
) -> Hook:
    return Hook(
        target=f"{_CONTROLLER}.{method}",
        bound_in=(_CONTROLLER,),
        parameters=("self", *parameters),
        wrap=wrap,
        why=why,
        until=until,
    )
