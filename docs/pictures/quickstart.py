"""Draws what `make quickstart` measured: `python docs/pictures/quickstart.py` after it, on the machine it ran on.

A bar is the work of a rank in one step: CPU seconds of its process in Megatron's train_step. Ranks meet at the end of
a step, so the one with less to do waits: hatched. A rank that waits sleeps, and all ranks share a core in turn, so this
is what each would take on a core of its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from panels import Bar, Panel

RESULT = Path(__file__).parents[2] / "build" / "quickstart" / "result.json"
POLICIES = {"stock": "Stock Megatron", "dynamic-cp": "Balanced"}


def panel(title: str, seconds: NDArray[np.float64], *, longest: float) -> Panel:
    """Steps one after another, each as long as its busiest rank.

    Args:
        title: names the policy.
        seconds: `[num_ranks, num_steps]`.
        longest: step of the darkest colour, seconds.
    """
    busiest = seconds.max(axis=0)
    starts = np.cumsum(busiest) - busiest
    idle = 1 - seconds.sum() / (len(seconds) * busiest.sum())
    bars: list[Bar] = []
    for rank, spans in enumerate(seconds):
        for start, worked, lasted in zip(starts, spans, busiest, strict=True):
            bars.append(Bar(rank, start=start, duration=worked, shade=worked / longest))
            bars.append(Bar(rank, start=start + worked, duration=lasted - worked, shade=None))
    return Panel(
        f"{title}: {busiest.mean():.2f} s a step, ranks wait {idle:.0%} of the time",
        rows=[f"rank {rank}" for rank in range(len(seconds))],
        bars=bars,
    )


def panels(policies: Sequence[str] = tuple(POLICIES)) -> list[Panel]:
    """The measured timelines, one a policy."""
    figures = json.loads(RESULT.read_text())["policies"]
    seconds = {policy: np.array(figures[policy]["cpu_seconds"]) for policy in policies}
    longest = max(times.max() for times in seconds.values())
    return [panel(POLICIES[policy], seconds[policy], longest=longest) for policy in policies]


def main() -> None:
    """Write before_after_light.svg and before_after_dark.svg beside this file."""
    from timeline import draw  # loads matplotlib

    from megatron_balance.runtime.process import environment  # loads torch

    measured = panels()
    num_ranks, num_steps = len(measured[0].rows), len(measured[0].bars) // (2 * len(measured[0].rows))
    draw(
        measured,
        time_label=f"CPU seconds of {num_steps} steps, measured on {environment('cpu')['device']}, {num_ranks} ranks",
        path=Path(__file__).with_name("before_after.svg"),
        schemes=("light", "dark"),
    )


if __name__ == "__main__":
    main()
