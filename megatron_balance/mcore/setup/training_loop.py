"""The training loop that a balanced run is part of: attributes that a step changes, and the log."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from megatron_balance.planner import DataSchedule


@contextlib.contextmanager
def holding(target: Any, **values: Any) -> Iterator[None]:
    """Have attributes of an object hold these values in this context."""
    stock = {name: getattr(target, name, None) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in stock.items():
            setattr(target, name, value)


class RunLog:
    """Prints lines, and each warning once, where it is enabled: on one rank."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._warned: set[str] = set()

    def say(self, message: str) -> None:
        """Print a line."""
        if self._enabled:
            print(f"megatron_balance: {message}", flush=True)

    def warn_once(self, message: str, *, topic: str | None = None) -> None:
        """Print a warning the first time; messages of one topic count as one."""
        if (topic or message) not in self._warned:
            self._warned.add(topic or message)
            self.say(f"WARNING: {message}")

    def warn_of_oversized(self, schedule: DataSchedule) -> None:
        """Warn once where a sample is longer than the cap."""
        if not schedule.oversized:
            return
        longest = int(schedule.padded_lengths.max())
        topology = schedule.topology.at_cp_size(schedule.topology.dynamic_cp_sizes[-1])
        cap = schedule.limits.max_tokens_per_microbatch(topology)
        self.warn_once(
            f"a sample of {longest} tokens is longer than a micro-batch may be ({cap}, --max-tokens-per-gpu times "
            f"{topology.cp_size} context-parallel ranks). Such samples run alone; raise the cap or shorten them if "
            "memory runs out.",
            topic="oversized",
        )
