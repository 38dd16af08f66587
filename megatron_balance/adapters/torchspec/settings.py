"""What `install` was asked for, checked once."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from megatron_balance.errors import BalanceError

APPROACHES = ("A", "B", "C")
COSTS = ("padded", "tokens")
WINDOWS = (2, 3, 4)
"""Dispatches' worth of samples in the pool: more gains little and keeps more hidden states in Mooncake."""


@dataclass(frozen=True)
class Settings:
    """How samples are balanced.

    Attributes:
        approach: `A`, `B` or `C`.
        window: dispatches' worth of samples to choose among, for `B` and `C`; `C` takes 1 as well, which leaves
            dispatches in order of arrival.
        cost: what a rank's time grows with. `padded`: its longest sample, which TorchSpec pads to. `tokens`: its
            tokens, for a trainer that packs.
        bucket_batches: for `C`, dispatches that a bucket of like lengths holds. More shuffles more and pads more.

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
        windows = (1, *WINDOWS) if self.approach == "C" else WINDOWS
        if isinstance(self.window, bool) or self.window not in windows:
            raise BalanceError(f"window is {self.window!r}: approach {self.approach} takes one of {windows}.")
        if isinstance(self.bucket_batches, bool) or not isinstance(self.bucket_batches, int) or self.bucket_batches < 1:
            raise BalanceError(f"bucket_batches is {self.bucket_batches!r}: it must be an integer of at least 1.")

    @property
    def chooses(self) -> bool:
        """Whether a dispatch is chosen among more samples than it takes."""
        return self.approach != "A" and self.window > 1
