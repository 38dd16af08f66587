"""Collects the figures of a run step by step and logs them every `--log-interval` steps.

    every step         the plan and, once the device has finished, the measured seconds: kept on each rank
    every log interval  seconds gathered → figures on the first rank → one line there
    a step later        scalars on the last rank

Ranks that read data (the first of every tensor-parallel group) measure. They and the last rank of the world, which
has Megatron's writers, meet once a log interval, over a group of their own, in a thread of their own: training goes on
meanwhile. It is another thread than the one that prepares steps: ranks of one data-parallel group may prepare a step
before they log, and ranks of another one after. The line is printed as soon as the ranks have met; scalars are written
after the log of a later step, by the training thread, which alone uses Megatron's writers.

Invariants: every rank of the group meets for the same iterations, which follow from `--log-interval` and from what was
balanced; between them nothing is sent. The figures of an interval are written before the next one's are gathered, and
before a checkpoint. A step that Megatron runs again counts once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_balance.mcore.setup.run_log import RunLog
from megatron_balance.mcore.step.background import BackgroundThread
from megatron_balance.mcore.step.balanced_step import BalancedStep
from megatron_balance.mcore.telemetry.figures import Figures, log_line
from megatron_balance.mcore.telemetry.observer import TimedStep, Watcher
from megatron_balance.mcore.telemetry.scalars import send_to_writers, write_scalars
from megatron_balance.runtime.peers import PeerError
from megatron_balance.runtime.rank_seconds import busiest_over_mean, gather_rank_seconds

MAX_STEPS = 256
"""The newest steps of a log interval, beyond which older ones are left out of the figures."""


@dataclass(frozen=True)
class _Interval:
    """This rank's figures of the steps between two log lines: iteration of the line, planned figures, own seconds."""

    iteration: int
    objective: str
    planned: Sequence[Figures]
    num_shapes: int
    seconds: NDArray[np.float64]


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
        self._thread = BackgroundThread("megatron_balance_figures")
        self._gathering: tuple[int, Future[Figures]] | None = None  # and the iteration of its figures
        self._newest = 0

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
        """Write the figures that are known by now, and gather the next at the end of an interval.

        Call after Megatron has logged a step, on every rank after every step.

        Raises:
            PeerError: not all ranks answered when figures were gathered.
        """
        self._newest = iteration
        ends_interval = bool(iteration % self._log_interval == 0 and self._steps)
        # The others end this interval as well: none of them can still be missing from the last one's meeting.
        self._write_gathered(wait=ends_interval)
        if ends_interval:
            interval = _Interval(
                iteration,
                self._objective,
                planned=list(self._steps.values()),
                num_shapes=len(self._shapes),
                seconds=np.array([self._seconds.get(step, np.nan) for step in self._steps]),
            )
            self._gathering = iteration, self._thread.submit(functools.partial(self._gather, interval))
            self._steps.clear()
            self._seconds.clear()

    def flush(self) -> None:
        """Write the figures that are being gathered."""
        self._write_gathered(wait=True)

    def _gather(self, interval: _Interval) -> Figures:
        """Figures of all ranks, on all of them; and the log line. Runs in the thread of this class."""
        try:
            gathered = gather_rank_seconds(
                interval.seconds, dp_rank=self._dp_rank, dp_size=self._dp_size, group=self._group
            )
            figures = self._unknown
            if gathered is not None:
                figures = replace(
                    Figures.mean(interval.planned),
                    num_shapes=float(interval.num_shapes),
                    measured_imbalance=busiest_over_mean(gathered),
                    busiest_rank_seconds=_mean_of_known(gathered.max(axis=0)),
                )
                self._log.say(f"iteration {interval.iteration} | {interval.objective} | {log_line(figures)}")
            return send_to_writers(figures, group=self._group)
        except PeerError as error:
            # At once: training may be in a collective whose watchdog ends the process.
            RunLog(enabled=True).warn_once(f"the figures of iteration {interval.iteration}: {error}")
            raise

    def _write_gathered(self, *, wait: bool) -> None:
        if self._gathering is None:
            return
        iteration, gathering = self._gathering
        if not (wait or gathering.done()):
            return
        self._gathering = None
        figures = gathering.result()
        if self._group.rank() == self._group.size() - 1:
            write_scalars(figures, iteration=iteration, newest=self._newest)


def _mean_of_known(seconds: NDArray[np.float64]) -> float:
    known = seconds[np.isfinite(seconds)]
    return float(known.mean()) if known.size else float("nan")
