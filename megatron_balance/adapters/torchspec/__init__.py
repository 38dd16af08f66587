"""TorchSpec adapter: ranks of a speculative-decoding trainer get batches of similar lengths.

    from megatron_balance.adapters import torchspec
    patches = torchspec.install(approach="B", window=4)      # before the controller starts
    patches.undo()

or, without code, `python -m megatron_balance.adapters.torchspec --balance-approach B ...` in place of
`python -m torchspec.train_entry ...`.

TorchSpec's controller collects samples in a pool, and every dispatch gives each rank `per_dp_rank_batch_size` of
them in turn. The trainer pads them to the longest, and all ranks wait for the slowest.

    A  the samples of a dispatch are given to ranks by length (`plan.py`)
    B  also, they are chosen among `window` dispatches' worth of the pool (`window.py`, `controller.py`)
    C  also, the data set is sorted into dispatches of similar lengths beforehand (`plan.py`)

Each includes the one before it. Importing the package patches nothing.
"""

from __future__ import annotations

import argparse
import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from importlib import util
from pathlib import Path

from megatron_balance.adapters.kit import Adapter, Function, Hook, check_not_started, find_version, hook_row
from megatron_balance.adapters.torchspec.controller import (
    CONTROLLER,
    with_delays_reported,
    with_presorted_data,
    with_ranks_by_length,
    with_window,
)
from megatron_balance.adapters.torchspec.plan import assign_ranks, bucketed_order
from megatron_balance.adapters.torchspec.window import DispatchWindow
from megatron_balance.errors import BalanceError

__all__ = ["DispatchWindow", "Settings", "adapter", "assign_ranks", "bucketed_order", "install", "is_installed"]

_CONTROLLER = "megatron_balance.adapters.torchspec.controller:AsyncTrainingController"


APPROACHES = ("A", "B", "C")
COSTS = ("padded", "tokens")
WINDOWS = (2, 3, 4)
"""Sizes of the pool, in dispatches: larger ones gain little and keep more hidden states in Mooncake."""


@dataclass(frozen=True)
class Settings:
    """Settings of the balancing.

    Attributes:
        approach: `A`, `B` or `C`.
        window: dispatches' worth of samples to choose among, for `B` and `C`; `C` takes 1 as well, which leaves
            dispatches in order of arrival.
        cost: measure of a rank's time. `padded`: its longest sample, which TorchSpec pads to. `tokens`: its tokens,
            for a trainer that packs, with `A` alone: a window chooses by padding.
        bucket_batches: for `C`, dispatches that a bucket of similar lengths holds. More shuffles more and pads more.

    Raises:
        BalanceError: a value is none of these.
    """

    approach: str
    _: KW_ONLY
    window: int = 2
    cost: str = "padded"
    bucket_batches: int = 1

    def __post_init__(self) -> None:
        if self.approach not in APPROACHES:
            raise BalanceError(f"approach is {self.approach!r}: it must be one of {', '.join(APPROACHES)}.")
        if self.cost not in COSTS:
            raise BalanceError(f"cost is {self.cost!r}: it must be one of {', '.join(COSTS)}.")
        if self.cost == "tokens" and self.approach != "A":
            raise BalanceError(f"cost is 'tokens' with approach {self.approach}: give approach A, or cost padded.")
        windows = (1, *WINDOWS) if self.approach == "C" else WINDOWS
        if isinstance(self.window, bool) or self.window not in windows:
            raise BalanceError(f"window is {self.window!r}: approach {self.approach} takes one of {windows}.")
        if isinstance(self.bucket_batches, bool) or not isinstance(self.bucket_batches, int) or self.bucket_batches < 1:
            raise BalanceError(f"bucket_batches is {self.bucket_batches!r}: it must be an integer of at least 1.")

    @property
    def chooses(self) -> bool:
        """True if a dispatch is chosen among more samples than it takes."""
        return self.approach != "A" and self.window > 1


def read_flags(arguments: Sequence[str] | None = None) -> tuple[Settings, list[str]]:
    """The settings of a command line, and the arguments that are not the adapter's.

    Args:
        arguments: the command line; None takes the process's own.

    Raises:
        BalanceError: see `Settings`.
    """
    # No -h: it belongs to TorchSpec.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--balance-approach", choices=APPROACHES, default="B")
    parser.add_argument("--balance-window", type=int, default=2)
    parser.add_argument("--balance-cost", choices=COSTS, default="padded")
    parser.add_argument("--balance-bucket-batches", type=int, default=1)
    flags, others = parser.parse_known_args(arguments)
    settings = Settings(
        flags.balance_approach,
        window=flags.balance_window,
        cost=flags.balance_cost,
        bucket_batches=flags.balance_bucket_batches,
    )
    return settings, others


def _find_version() -> str | None:
    """The version of the TorchSpec that would be imported."""
    spec = util.find_spec("torchspec")
    # A folder of that name without an __init__.py has no origin.
    if spec is None or spec.origin is None:
        raise BalanceError("torchspec is not installed: install it from its git repository, PyPI's is a placeholder.")
    # A checkout on PYTHONPATH has no metadata; its version is in a file beside the package.
    version_file = Path(spec.origin).parent.parent / "version.txt"
    if version_file.is_file():
        return version_file.read_text().strip()
    return find_version("torchspec", missing=f"torchspec in {spec.origin} has no version: install it with pip.")


adapter: Adapter[Settings] = Adapter(
    "torchspec",
    versions=("0.1.0",),
    remedy="use that, or train without balancing",
    find_version=_find_version,
)


def install(
    approach: str = "A", *, window: int = 2, cost: str = "padded", bucket_batches: int = 1
) -> Adapter[Settings]:
    """Balance the ranks of TorchSpec's trainer. Call it in the driver, before the controller starts.

    Installing twice installs once.

    Args:
        approach: `A`, `B` or `C`, described in the package's docstring.
        window: dispatches' worth of samples to choose among in `B` and `C`: 2, 3 or 4; in `C` also 1, for none.
        cost: `padded`, as TorchSpec trains, or `tokens`, with `A` alone, for a trainer that packs.
        bucket_batches: dispatches of a bucket of similar lengths in `C`.

    Raises:
        BalanceError: an argument is not one of these; TorchSpec is missing, of another version, or not as expected; a
            controller has started; other settings are installed. Nothing is changed then.
    """
    settings = Settings(approach, window=window, cost=cost, bucket_batches=bucket_batches)

    def check() -> None:
        check_not_started(importlib.import_module(CONTROLLER).AsyncTrainingController)

    return adapter.hook(settings, lambda: _hooks(settings), check=check)


def is_installed() -> bool:
    """True if `install` has hooked the controller in this process."""
    return adapter.is_installed


def _hooks(settings: Settings) -> tuple[Hook, ...]:
    """The table of one approach."""

    def row(method: str, parameters: str, *, wrap: Callable[..., Function], why: str, until: str) -> Hook:
        wrap = functools.partial(wrap, settings=settings)
        return hook_row(f"{_CONTROLLER}.{method}", f"self {parameters}", wrap=wrap, why=why, until=until)

    hooks = [
        row(
            "_partition_results",
            "results",
            wrap=with_ranks_by_length,
            why="gives the samples of a dispatch to ranks in turn, whatever their lengths",
            until="TorchSpec assigns by padded length (later commits assign longest first, by tokens)",
        )
    ]
    if settings.chooses:
        hooks += [
            row(
                "try_dispatch_batch",
                "",
                wrap=with_window,
                why="takes the oldest samples of the pool, whatever their lengths",
                until="TorchSpec chooses among the samples of its pool",
            ),
            row(
                "get_status",
                "",
                wrap=with_delays_reported,
                why="the delay that choosing costs is reported with the rest of the status",
                until="the hook of try_dispatch_batch goes",
            ),
        ]
    if settings.approach == "C":
        hooks.append(
            row(
                "_prepare_dataset",
                "skip",
                wrap=with_presorted_data,
                why="orders the prompts of an epoch, at random",
                until="TorchSpec buckets by dispatch_batch_size (later commits have length_group_size)",
            )
        )
    return tuple(hooks)
