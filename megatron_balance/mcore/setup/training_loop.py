"""The training loop that a balanced run is part of: its steps, the options that a step changes, and its log."""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Iterator
from contextlib import AbstractContextManager
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


class LoopState:
    """The steps of a loop: Megatron's own counts them in its arguments, `args`; for any other, `num_done` does."""

    def __init__(self, num_steps: int | None, args: Namespace | None) -> None:
        self.num_done = 0
        self.is_sft = bool(getattr(args, "sft", False))
        self._num_steps, self._args = num_steps, args

    @property
    def iteration(self) -> int:
        """The number in the log of the newest step, from 1; under `--skip-train` it is the checkpoint's."""
        if self._args is None:
            return self.num_done + 1
        before = getattr(self._args, "curr_iteration", None)
        return self._args.iteration if before is None else before + 1

    @property
    def has_next_step(self) -> bool:
        """True if another step may follow; a data set may hold no more than the steps there are.

        A run that ends before (--exit-interval, by time, by a signal) has prepared one step more, on every rank.
        """
        return self._num_steps is None or self.iteration < self._num_steps

    def with_args(self, **values: Any) -> AbstractContextManager[None]:
        """Have Megatron's arguments hold these values in this context; other loops do not read them."""
        return contextlib.nullcontext() if self._args is None else holding(self._args, **values)


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
