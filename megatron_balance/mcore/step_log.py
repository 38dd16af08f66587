"""What a run says of its balancing: one line every `--log-interval` steps, and warnings once."""

from __future__ import annotations

from megatron_balance.mcore.step_maker import BalancedStep
from megatron_balance.planner.metrics import schedule_metrics
from megatron_balance.planner.schedule import DataSchedule


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

    def step(self, step: BalancedStep) -> None:
        """Note a step."""
        schedule = step.schedule
        if not self._enabled or schedule is None:
            return
        if schedule.oversized:
            self.warn_once(_about_oversized(schedule), topic="oversized")
        self._num_steps += 1
        if self._num_steps % self._log_interval:
            return
        metrics = schedule_metrics(schedule)
        total = max(int(schedule.padded_lengths.sum()), 1)
        moved = (metrics.moved_tokens or 0) / total
        unlabelled = (metrics.moved_tokens_unlabelled or 0) / total
        print(
            f"megatron_balance: {metrics.objective} | planned max/mean {metrics.step_imbalance:.4f}"
            f" | {metrics.over_bound:.4f} of the bound | micro-batches {metrics.num_microbatches}"
            f"{_about_pool(step)}{_about_calibration(step)} | padding {metrics.padding_fraction:.1%}"
            f" | moved {moved:.0%} of tokens, not {unlabelled:.0%}"
            f" | plan {step.plan_seconds * 1e3:.1f} ms | exchange {step.exchange_seconds * 1e3:.1f} ms"
            f" | exposed {step.exposed_seconds * 1e3:.1f} ms",
            flush=True,
        )


def _about_oversized(schedule: DataSchedule) -> str:
    longest = int(schedule.padded_lengths.max())
    cap = schedule.limits.max_tokens_per_microbatch(schedule.topology)
    return (
        f"a sample of {longest} tokens is longer than a micro-batch may be ({cap}, --max-tokens-per-gpu times "
        "--context-parallel-size). Such samples run alone; raise the cap or shorten them if memory runs out."
    )


def _about_pool(step: BalancedStep) -> str:
    return "" if step.pool is None else f" | drift {step.pool.drift:.3f}"


def _about_calibration(step: BalancedStep) -> str:
    """How well the seconds of micro-batches are foretold, once they are."""
    if step.calibration is None or step.calibration.error is None:
        return ""
    return f" | calibrated, off by {step.calibration.error:.1%}"
