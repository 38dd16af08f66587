"""Writes the plan and the seconds of every step during a run (`--balance-record DIR`, `record/run_record.py`).

The first rank of the run writes the plans; the first rank of every model replica (tensor-, pipeline- and
context-parallel rank 0) writes its seconds; with `--balance-context-parallel` that of every context-parallel rank, as
these run different micro-batches. A line is written with every step, so a killed run loses at most its last one.

Invariants: nothing is sent between ranks for it; a new run replaces the record in the folder, a resumed one continues
it. A full disk does not end training: the rank warns and stops recording.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from megatron_balance.mcore.setup.run_log import RunLog
from megatron_balance.mcore.step.balanced_step import BalancedStep
from megatron_balance.mcore.telemetry.observer import TimedStep, Watcher
from megatron_balance.record import PlanWriter, RunInfo, SecondsWriter, StepRecord


class RunRecording(Watcher):
    """One rank's part of the record.

    Args:
        folder: of the record.
        info: on the rank that writes plans; None on the others.
        dp_rank: data-parallel rank of this one, or its leaf.
        resume: whether the run resumes from a checkpoint.

    Raises:
        OSError: the folder cannot be written to.
    """

    def __init__(self, folder: Path, *, info: RunInfo | None, dp_rank: int, resume: bool) -> None:
        self._folder = folder
        self._seconds = SecondsWriter(folder, dp_rank=dp_rank, resume=resume)
        self._plans = None if info is None else PlanWriter(folder, info=info, resume=resume)
        # Every rank that writes has a disk of its own to fill.
        self._log = RunLog(enabled=True)
        self._newest = 0
        self._failed = False

    def begin(self, step: BalancedStep, *, iteration: int) -> None:
        """Record a step's plan, once even if Megatron runs the step again."""
        if self._plans is None or step.schedule is None or iteration == self._newest:
            return
        self._newest = iteration
        record = StepRecord.of_schedule(
            step.schedule,
            iteration=iteration,
            plan_seconds=step.plan_seconds,
            exchange_seconds=step.exchange_seconds,
            exposed_seconds=step.exposed_seconds,
        )
        plans = self._plans
        self._write(lambda: plans.add(record))

    def measured(self, timed: TimedStep) -> None:
        """Record the seconds of a step; unknown for each micro-batch under a virtual pipeline."""
        seconds = timed.seconds
        if len(seconds) != timed.num_microbatches:
            seconds = np.full(timed.num_microbatches, np.nan)
        self._write(lambda: self._seconds.add(timed.iteration, seconds=seconds))

    def _write(self, write: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            write()
        except OSError as error:
            self._failed = True
            self._log.warn_once(f"--balance-record {self._folder}: {error}. Training continues without the record.")
