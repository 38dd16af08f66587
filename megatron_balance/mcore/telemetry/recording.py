"""Writes the plan and the seconds of every step during a run (`--balance-record DIR`, `record/run_record.py`).

The first rank of the run writes the plans; the first rank of every model replica (tensor-, pipeline- and
context-parallel rank 0) writes its seconds; with `--balance-context-parallel` that of every context-parallel rank, as
these run different micro-batches. A line is written with every step, so a killed run loses at most its last one.

Invariants: nothing is sent between ranks for it; a new run replaces the record in the folder, a resumed one continues
it. A folder that cannot be written to does not end training: the rank warns and stops recording.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_balance.mcore.setup.layout import Layout
from megatron_balance.mcore.setup.run_log import RunLog
from megatron_balance.mcore.setup.settings import Settings
from megatron_balance.mcore.step.balanced_step import BalancedStep
from megatron_balance.mcore.step.planner import StepPlanner
from megatron_balance.planner import resolve_objective
from megatron_balance.record import PlanWriter, RunInfo, SecondsWriter, StepRecord
from megatron_balance.runtime.environment import device_kind, environment


class RunRecording:
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
            plan_seconds=step.figures["plan_seconds"],
            exchange_seconds=step.figures["exchange_seconds"],
            exposed_seconds=step.exposed_seconds,
        )
        plans = self._plans
        self._write(lambda: plans.add(record))

    def measured(self, iteration: int, *, seconds: NDArray[np.float64], num_microbatches: int) -> None:
        """Record the seconds of a step; unknown for each micro-batch under a virtual pipeline."""
        of_each = seconds if len(seconds) == num_microbatches else np.full(num_microbatches, np.nan)
        self._write(lambda: self._seconds.add(iteration, seconds=of_each))

    def _write(self, write: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            write()
        except OSError as error:
            self._failed = True
            self._log.warn_once(f"--balance-record {self._folder}: {error}. Training continues without the record.")


def recording_of(
    settings: Settings, *, layout: Layout, planner: StepPlanner, writes_plans: bool
) -> RunRecording | None:
    """This rank's part of the record; None where it has none, or its folder cannot be written to.

    Args:
        settings: of the run.
        layout: of the ranks.
        planner: of this rank.
        writes_plans: this rank is the first of the world.
    """
    dynamic_cp = planner.topology.dynamic_cp
    if settings.record is None or not layout.is_first_of_replica(of_leaf=dynamic_cp):
        return None
    info = None
    if writes_plans:
        rate = {} if settings.attention_rate is None else {"attention_rate": settings.attention_rate}
        info = RunInfo(
            topology=planner.topology,
            limits=planner.limits,
            cost_model=planner.cost_model,
            cost_name=settings.cost_name,
            objective=resolve_objective(settings.objective, topology=planner.topology),
            policy=settings.policy,
            origin=environment(device_kind()) | rate,
        )
    try:
        return RunRecording(
            Path(settings.record),
            info=info,
            dp_rank=planner.leaf if dynamic_cp else planner.dp_rank,
            resume=settings.resumes,
        )
    except OSError as error:
        RunLog(enabled=True).warn_once(
            f"--balance-record {settings.record}: {error}. Training continues without the record; name a folder that "
            "every node can write to."
        )
        return None
