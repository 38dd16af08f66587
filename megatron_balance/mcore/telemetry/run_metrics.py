"""Collects the figures of a run step by step and logs them every `--log-interval` steps.

    every step         the plan and, once the device has finished, the measured seconds: kept on each rank
    every log interval  seconds gathered → figures on the first rank → one line there, scalars on the last rank

Ranks that read data (the first of every tensor-parallel group) measure. They and the last rank of the world, which
has Megatron's writers, meet once a log interval, over a group of their own, right after Megatron logged the step: its
own log has waited for all ranks and the device just before.

Invariants: every rank of the group meets at the same iterations, which follow from `--log-interval` and from what was
balanced; between them nothing is sent. A step that Megatron runs again counts once.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch.distributed as dist

from megatron_balance.mcore.setup.run_log import RunLog
from megatron_balance.mcore.step.balanced_step import BalancedStep
from megatron_balance.mcore.telemetry.figures import Figures, log_line
from megatron_balance.mcore.telemetry.observer import TimedStep, Watcher
from megatron_balance.mcore.telemetry.scalars import send_to_writers, write_scalars
from megatron_balance.runtime.rank_seconds import busiest_over_mean, gather_rank_seconds

MAX_STEPS = 256
"""The newest steps of a log interval, beyond which older ones are left out of the figures."""


class RunMetrics(Watcher):
    """One rank's part.

    Args:
        log: prints on the first rank.
        log_interval: steps between lines.
        group: ranks that measure and the last rank of the world, gloo.
        dp_rank: data-parallel rank of this one, or NOT_MEASURING.
        dp_size: data-parallel ranks.
        num_cp_sizes: context-parallel sizes that micro-batches have; 0 where all have the run's.
    """

    def __init__(
        self,
        log: RunLog,
        *,
        log_interval: int,
        group: dist.ProcessGroup,
        dp_rank: int,
        dp_size: int,
        num_cp_sizes: int = 0,
    ) -> None:
        self._log = log
        self._log_interval = log_interval
        self._group = group
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self._unknown = Figures.unknown(num_cp_sizes=num_cp_sizes)
        self._objective = ""
        self._steps: dict[int, Figures] = {}  # by iteration; every rank has the same iterations
        self._seconds: dict[int, float] = {}
        self._shapes: set[int] = set()  # at most one for each token of the cap

    def begin(self, step: BalancedStep, *, iteration: int) -> None:
        """Keep the planned figures of a step."""
        figures = self._unknown
        if step.schedule is not None and self._group.rank() == 0:
            figures = Figures.of_step(step, schedule=step.schedule)
            self._objective = step.schedule.objective
            self._shapes.update(step.microbatch_tokens)
        self._steps[iteration] = figures
        while len(self._steps) > MAX_STEPS:
            del self._steps[next(iter(self._steps))]

    def measured(self, timed: TimedStep) -> None:
        """Keep the measured seconds of a step."""
        if timed.iteration in self._steps:
            self._seconds[timed.iteration] = float(timed.seconds.sum())

    def logged(self, iteration: int) -> None:
        """Log the figures right after Megatron's own. Call after every step."""
        if iteration % self._log_interval or not self._steps:
            return
        seconds = np.array([self._seconds.get(step, np.nan) for step in self._steps])
        gathered = gather_rank_seconds(seconds, dp_rank=self._dp_rank, dp_size=self._dp_size, group=self._group)
        figures = self._unknown
        if gathered is not None:
            figures = replace(
                Figures.mean(list(self._steps.values())),
                num_shapes=float(len(self._shapes)),
                measured_imbalance=busiest_over_mean(gathered),
                busiest_rank_seconds=_mean_of_known(gathered.max(axis=0)),
            )
            self._log.say(f"iteration {iteration} | {self._objective} | {log_line(figures)}")
        figures = send_to_writers(figures, group=self._group)
        if self._group.rank() == self._group.size() - 1:
            write_scalars(figures, iteration=iteration)
        self._steps.clear()
        self._seconds.clear()


def _mean_of_known(seconds: np.ndarray) -> float:
    known = seconds[np.isfinite(seconds)]
    return float(known.mean()) if known.size else float("nan")
