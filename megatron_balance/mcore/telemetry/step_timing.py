"""Which micro-batch took how long, without making the device wait.

The wrapped forward-step function and the hook on Megatron's `backward_step` mark where passes begin and end.
Marks are read after a later step, or after Megatron logged one, if the device has passed them by then.

What is measured is this rank's stream of work between the marks of a pass, so it holds what the pass waits for:

- in expert-parallel layers the all-to-all, and under FSDP or ZeRO-3 the parameters: the slowest rank of such a group
  makes the others look as slow as itself, and measured ranks look more even than they are;
- in tensor- and context-parallel layers the peers of the same micro-batch, which do the same work.

Not in it: waiting for pipeline neighbours, the gradient reduction, the optimiser. On a CPU (the shim) it is the
thread's own CPU time, and waiting is never in it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_balance.calibration.features import is_slowest, slot_features
from megatron_balance.calibration.online import OnlineCalibration
from megatron_balance.planner.schedule import DataSchedule
from megatron_balance.runtime.timing import StepTimer

MAX_UNREAD_STEPS = 8
"""Steps whose marks the device may be behind; older ones are forgotten."""


@dataclass(frozen=True, eq=False)
class TimedStep:
    """What one step took on this rank.

    Attributes:
        iteration: Megatron's count of it, from 1.
        schedule: the plan.
        seconds: `[num_microbatches]` forward and backward; or `[1]`, their sum, where a rank holds several model
            chunks (virtual pipeline) and only the step as a whole is known.
    """

    iteration: int
    schedule: DataSchedule
    seconds: NDArray[np.float64]


Listener = Callable[[TimedStep], None]


class StepTiming:
    """Times the micro-batches of one rank's steps.

    Args:
        listeners: told of every step that was measured, in the order of steps.
        on_gpu: whether micro-batches run on a GPU.
    """

    def __init__(self, listeners: Sequence[Listener], *, on_gpu: bool) -> None:
        self._listeners = tuple(listeners)
        self._on_gpu = on_gpu
        self._unread: deque[tuple[int, DataSchedule, StepTimer]] = deque(maxlen=MAX_UNREAD_STEPS)
        self._timer: StepTimer | None = None

    def begin(self, schedule: DataSchedule, *, iteration: int) -> None:
        """Read what earlier steps took, and time this one."""
        self.read_finished()
        self._timer = StepTimer(on_gpu=self._on_gpu)
        self._unread.append((iteration, schedule, self._timer))

    def end(self) -> None:
        """What runs from now on (evaluation) is no part of the step."""
        self._timer = None

    def read_finished(self) -> None:
        """Tell the listeners of every step that the device has finished."""
        while self._unread and self._unread[0][2] is not self._timer and self._unread[0][2].finished:
            iteration, schedule, timer = self._unread.popleft()
            seconds = timer.seconds(schedule.num_microbatches)
            if seconds is not None:
                for listener in self._listeners:
                    listener(TimedStep(iteration, schedule, seconds))

    def forward(self, slot: int) -> AbstractContextManager[None]:
        """Times a forward pass of this step."""
        return contextlib.nullcontext() if self._timer is None else self._timer.forward(slot)

    def backward(self) -> AbstractContextManager[None]:
        """Times a backward pass of this step."""
        return contextlib.nullcontext() if self._timer is None else self._timer.backward()


def calibrating(calibration: OnlineCalibration, *, dp_rank: int) -> Listener:
    """A listener that lets the online calibration learn from this rank's micro-batches.

    Args:
        calibration: what learns.
        dp_rank: of this rank.
    """

    def learn(timed: TimedStep) -> None:
        features = slot_features(timed.schedule, rank=dp_rank, cost_model=calibration.prior)
        own = is_slowest(timed.schedule, rank=dp_rank)
        if len(timed.seconds) != timed.schedule.num_microbatches:
            # Several model chunks: only the step as a whole is known.
            features, own = features.sum(axis=0, keepdims=True), own.all(keepdims=True)
        calibration.add(features[own], seconds=timed.seconds[own])

    return learn
