"""The log of a run: lines and warnings, each warning once."""

from __future__ import annotations

from megatron_balance.planner import DataSchedule


class RunLog:
    """Prints on one rank.

    Args:
        enabled: True if this rank prints.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._warned: set[str] = set()

    def warn_once(self, message: str, *, topic: str | None = None) -> None:
        """Print a warning the first time.

        Args:
            message: text of the warning.
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
