"""What a run says of its balancing: one line every `--log-interval` steps, and warnings once."""

from __future__ import annotations

import numpy as np

from megatron_balance.mcore.balancer import BalancedStep


class StepLog:
    """Prints on one rank.

    Args:
        log_interval: steps between lines.
        enabled: whether this rank prints.
    """

    def __init__(self, *, log_interval: int, enabled: bool) -> None:
        self._log_interval = log_interval
        self._enabled = enabled
        self._num_steps = 0
        self._warned: set[str] = set()

    def warn_once(self, message: str) -> None:
        """Print a warning the first time it is given."""
        if self._enabled and message not in self._warned:
            print(f"megatron_balance: WARNING: {message}", flush=True)
        self._warned.add(message)

    def step(self, step: BalancedStep) -> None:
        """Note a step."""
        schedule = step.schedule
        if not self._enabled or schedule is None:
            return
        if len(schedule.oversized):
            longest = int(schedule.padded_lengths.max())
            limit = schedule.limits.max_tokens_per_microbatch(schedule.topology)
            self.warn_once_about_oversized(longest, limit)
        self._num_steps += 1
        if self._num_steps % self._log_interval:
            return
        loads = schedule.cost_grid.sum(axis=1)
        moved = "" if schedule.home_ranks is None else f" | moved {self._moved_share(step):.0%} of tokens"
        print(
            f"megatron_balance: {schedule.objective} | planned max/mean {loads.max() / max(loads.mean(), 1):.4f}"
            f" | {schedule.predicted_cost / max(schedule.lower_bound, 1):.4f} of the bound"
            f" | micro-batches {step.num_microbatches}{moved}"
            f" | plan {step.plan_seconds * 1e3:.1f} ms | exchange {step.exchange_seconds * 1e3:.1f} ms",
            flush=True,
        )

    def warn_once_about_oversized(self, longest: int, limit: int | None) -> None:
        """A sample over the cap runs alone: say it the first time, not for every length."""
        if "oversized" not in self._warned:
            self._warned.add("oversized")
            self.warn_once(
                f"a sample of {longest} tokens is longer than a micro-batch may be ({limit}, --max-tokens-per-gpu times "
                "--context-parallel-size). Such samples run alone; raise --max-tokens-per-gpu or shorten them if memory "
                "runs out."
            )

    def _moved_share(self, step: BalancedStep) -> float:
        schedule = step.schedule
        assert schedule is not None and schedule.home_ranks is not None
        moved = sum(
            int(schedule.padded_lengths[list(slot)][schedule.home_ranks[list(slot)] != rank].sum())
            for rank, slots in enumerate(schedule.ranks)
            for slot in slots
        )
        return moved / max(int(np.sum(schedule.padded_lengths)), 1)
