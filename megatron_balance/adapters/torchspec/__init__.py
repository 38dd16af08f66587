"""TorchSpec adapter: ranks of a speculative-decoding trainer get batches of similar lengths.

    from megatron_balance.adapters import torchspec
    patches = torchspec.install(approach="B", window=4)      # before the controller starts
    patches.undo()

or, without code, `python -m megatron_balance.adapters.torchspec --balance-approach B ...` in place of
`python -m torchspec.train_entry ...`.

TorchSpec's controller collects samples in a pool, and every dispatch gives each rank `per_dp_rank_batch_size` of
them in turn. The trainer pads them to the longest, and all ranks wait for the slowest.

    A  the samples of a dispatch are given to ranks by length (`plan.py`)
    B  also, they are chosen among `window` dispatches' worth of the pool (`window.py`, `dispatch.py`)
    C  also, the data set is sorted into dispatches of similar lengths beforehand (`plan.py`)

Each includes the one before it. Importing the package patches nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from megatron_balance.adapters.kit import Adapter, Function, Hook
from megatron_balance.adapters.torchspec.actor_class import SUPPORTED_VERSIONS, check_not_started, find_version
from megatron_balance.adapters.torchspec.dispatch import (
    with_delays_reported,
    with_presorted_data,
    with_ranks_by_length,
    with_window,
)
from megatron_balance.adapters.torchspec.plan import assign_ranks, bucketed_order
from megatron_balance.adapters.torchspec.settings import Settings
from megatron_balance.adapters.torchspec.window import DispatchWindow

__all__ = ["DispatchWindow", "Settings", "adapter", "assign_ranks", "bucketed_order", "install", "is_installed"]

_CONTROLLER = "megatron_balance.adapters.torchspec.actor_class:AsyncTrainingController"

adapter: Adapter[Settings] = Adapter(
    "torchspec",
    versions=SUPPORTED_VERSIONS,
    remedy="use that, or train without balancing",
    find_version=find_version,
)


def install(
    approach: str = "A", *, window: int = 2, cost: str = "padded", bucket_batches: int = 1
) -> Adapter[Settings]:
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
    return adapter.hook(settings, lambda: _hooks(settings), check=check_not_started)


def is_installed() -> bool:
    """True if `install` has hooked the controller in this process."""
    return adapter.is_installed


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
