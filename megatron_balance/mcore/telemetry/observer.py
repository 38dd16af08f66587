"""Times the micro-batches of a run without making the device wait, and hands every step to the run's watchers.

The wrapped forward-step function and the hook on Megatron's `backward_step` mark where passes begin and end. Marks are
read after a later step, or after Megatron logged one, if the device has passed them by then.

A pass is timed on this rank's stream of work between its marks, so its seconds include what it waits for:

- in expert-parallel layers the all-to-all, and under FSDP or ZeRO-3 the parameters: the slowest rank of such a group
  makes the others look as slow as itself, and measured ranks look more even than they are;
- in tensor- and context-parallel layers the peers of the same micro-batch, which do the same work.

They exclude waiting for pipeline neighbours, the gradient reduction and the optimizer. On a CPU (the shim) they are
the thread's own CPU time, and include no waiting.

Invariant: watching does not change training, and sends nothing but the gathers of `run_metrics.py`, from its thread.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_balance.mcore.step.balanced_step import BalancedStep
from megatron_balance.planner import DataSchedule
from megatron_balance.runtime.timing import StepTimer

MAX_UNREAD_STEPS = 8
"""Steps whose marks the device has not passed yet; older ones are dropped."""


@dataclass(frozen=True, eq=False)
class TimedStep:
    """The measured seconds of one step on this rank.

    Attributes:
        iteration: Megatron's count of it, from 1.
        schedule: the plan; None on a pipeline stage that loads no data.
        num_microbatches: that this rank ran.
        seconds: `[num_microbatches]` of this rank, forward and backward; or `[1]`, their sum, where a rank holds
            several model chunks (virtual pipeline) and only the step as a whole is known.
    """

    iteration: int
    schedule: DataSchedule | None
    num_microbatches: int
    seconds: NDArray[np.float64]


class Watcher:
    """Receives a run's steps on one rank. A subclass overrides the events that it needs."""

    def begin(self, step: BalancedStep, *, iteration: int) -> None:
        """Called before a step runs."""

    def measured(self, timed: TimedStep) -> None:
        """Called with the times of a step, in the order of steps, some steps after it ran."""

    def logged(self, iteration: int) -> None:
        """Called after Megatron has logged a step."""

    def flush(self) -> None:
        """Write what has not been written: the run ends or saves a checkpoint."""


class RunObserver:
    """Times steps and calls the watchers of one rank.

    Args:
        watchers: in the order in which they are called.
        times_passes: False on a rank that is not the first of its tensor-parallel group, and where passes overlap.
        on_gpu: whether micro-batches run on a GPU.
    """

    def __init__(self, watchers: Sequence[Watcher], *, times_passes: bool, on_gpu: bool) -> None:
        self._watchers = tuple(watchers)
        self._times_passes = times_passes
        self._on_gpu = on_gpu
        self._unread: deque[tuple[int, DataSchedule | None, int, StepTimer]] = deque(maxlen=MAX_UNREAD_STEPS)
        self._timer: StepTimer | None = None

    def begin(self, step: BalancedStep, *, iteration: int) -> None:
        """A step is about to run."""
        self._read_finished()
        if self._times_passes:
            self._timer = StepTimer(on_gpu=self._on_gpu)
            self._unread.append((iteration, step.schedule, step.num_microbatches, self._timer))
        for watcher in self._watchers:
            watcher.begin(step, iteration=iteration)

    def forward(self, slot: int) -> AbstractContextManager[None]:
        """Times a forward pass of the micro-batch in this slot."""
        return contextlib.nullcontext() if self._timer is None else self._timer.forward(slot)

    def backward(self) -> AbstractContextManager[None]:
        """Times a backward pass; they come in the order of the forward passes."""
        return contextlib.nullcontext() if self._timer is None else self._timer.backward()

    def end(self) -> None:
        """Ends the step: later passes (evaluation) are not timed."""
        self._timer = None

    def logged(self, iteration: int) -> None:
        """Called after Megatron has logged the step."""
        self._read_finished()
        for watcher in self._watchers:
            watcher.logged(iteration)

    def flush(self) -> None:
        """The run ends or saves a checkpoint."""
        self._read_finished()
        for watcher in self._watchers:
            watcher.flush()

    def _read_finished(self) -> None:
        """Hand over every step that the device has finished."""
        while self._unread and self._unread[0][-1] is not self._timer and self._unread[0][-1].finished:
            iteration, schedule, num_microbatches, timer = self._unread.popleft()
            seconds = timer.seconds(num_microbatches)
            if seconds is not None:
                for watcher in self._watchers:
                    watcher.measured(TimedStep(iteration, schedule, num_microbatches, seconds))
