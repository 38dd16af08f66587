"""The log of a run: one line every `--log-interval` steps, and warnings once."""

from __future__ import annotations

import math

from megatron_balance.errors import BalanceError
from megatron_balance.mcore.figures import Figures
from megatron_balance.planner.schedule import DataSchedule


class StepLog:
    """Prints on one rank.

    Args:
        enabled: whether this rank prints.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._warned: set[str] = set()

    def warn_once(self, message: str, *, topic: str | None = None) -> None:
        """Print a warning the first time.

        Args:
            message: what is said.
            topic: messages of one topic count as one; the message itself by default.
        """
        topic = topic or message
        if self._enabled and topic not in self._warned:
            print(f"megatron_balance: WARNING: {message}", flush=True)
        self._warned.add(topic)

    def say(self, message: str) -> None:
        """Print a line."""
        if self._enabled:
            print(f"megatron_balance: {message}", flush=True)

    def warn_of_oversized(self, schedule: DataSchedule) -> None:
        """Say once that a sample is longer than the cap, if one is."""
        if not schedule.oversized:
            return
        longest = int(schedule.padded_lengths.max())
        cap = schedule.limits.max_tokens_per_microbatch(schedule.topology)
        self.warn_once(
            f"a sample of {longest} tokens is longer than a micro-batch may be ({cap}, --max-tokens-per-gpu times "
            "--context-parallel-size). Such samples run alone; raise the cap or shorten them if memory runs out.",
            topic="oversized",
        )

    def line(self, figures: Figures, *, iteration: int, objective: str) -> None:
        """Print the line of the steps since the last one.

        Args:
            figures: means over these steps.
            iteration: of the newest, as Megatron counts.
            objective: of its plan.
        """
        if self._enabled:
            print(f"megatron_balance: iteration {iteration} | {objective} | {_line(figures)}", flush=True)


def tell_of_lost_peers(error: BalanceError, *, rank: int, iteration: int) -> None:
    """Say at once, on whichever rank noticed: training may be in a collective whose watchdog ends the process.

    Args:
        error: what was noticed while a step was prepared.
        rank: of this process.
        iteration: that was prepared.
    """
    print(f"megatron_balance: WARNING: rank {rank} prepares iteration {iteration}: {error}", flush=True)


def _line(figures: Figures) -> str:
    measured = "unknown"
    if not math.isnan(figures.measured_imbalance):
        measured = f"{figures.measured_imbalance:.4f} (busiest rank {figures.busiest_rank_seconds * 1e3:.1f} ms)"
    parts = [
        f"max/mean of rank time: planned {figures.planned_imbalance:.4f}, measured {measured}",
        f"{figures.over_bound:.4f} of the bound",
        f"micro-batches {figures.num_microbatches:.4g} ({figures.num_shapes:.0f} shapes so far)",
        *([] if math.isnan(figures.drift) else [f"drift {figures.drift:.3f}"]),
        *([] if math.isnan(figures.calibration_error) else [f"calibrated, off by {figures.calibration_error:.1%}"]),
        f"padding {figures.padding_fraction:.1%}",
        f"moved {figures.moved_fraction:.0%} of tokens, not {figures.moved_fraction_unlabelled:.0%}",
        f"plan {figures.plan_seconds * 1e3:.1f} ms",
        f"exchange {figures.exchange_seconds * 1e3:.1f} ms",
        f"exposed {figures.exposed_seconds * 1e3:.1f} ms",
    ]
    return " | ".join(parts)
