"""The adapter's settings, checked, and the flags that set them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from megatron_balance.errors import BalanceError

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
