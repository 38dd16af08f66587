"""Which micro-batch took how long, told to the online calibration.

The wrapped forward-step function and the hook on Megatron's `backward_step` mark where passes begin and end.
Marks are read when a later step begins, if the device has passed them by then: nothing waits for them.
"""

from __future__ import annotations

import contextlib
from collections import deque
from contextlib import AbstractContextManager

from megatron_balance.mcore.step_maker import BalancedStep
from megatron_balance.planner.slot_features import sets_the_pace, slot_features
from megatron_balance.runtime.online_calibration import OnlineCalibration
from megatron_balance.runtime.timing import StepTimer

MAX_UNREAD_STEPS = 8
"""Steps whose marks the device may be behind; older ones are forgotten."""


class StepTiming:
    """Times the micro-batches of one rank's steps.

    Args:
        calibration: what learns from them.
        dp_rank: of this rank.
        on_gpu: whether micro-batches run on a GPU.
    """

    def __init__(self, calibration: OnlineCalibration, *, dp_rank: int, on_gpu: bool) -> None:
        self._calibration = calibration
        self._dp_rank = dp_rank
        self._on_gpu = on_gpu
        self._unread: deque[tuple[BalancedStep, StepTimer]] = deque(maxlen=MAX_UNREAD_STEPS)
        self._timer: StepTimer | None = None

    def begin(self, step: BalancedStep) -> None:
        """Read what earlier steps took, and time this one."""
        while self._unread and self._unread[0][1].finished:
            self._tell(*self._unread.popleft())
        self._timer = StepTimer(on_gpu=self._on_gpu)
        self._unread.append((step, self._timer))

    def end(self) -> None:
        """What runs from now on (evaluation) is no part of the step."""
        self._timer = None

    def forward(self, slot: int) -> AbstractContextManager[None]:
        """Times a forward pass of this step."""
        return contextlib.nullcontext() if self._timer is None else self._timer.forward(slot)

    def backward(self) -> AbstractContextManager[None]:
        """Times a backward pass of this step."""
        return contextlib.nullcontext() if self._timer is None else self._timer.backward()

    def _tell(self, step: BalancedStep, timer: StepTimer) -> None:
        seconds = timer.seconds(step.num_microbatches)
        if seconds is None or step.schedule is None:
            return
        features = slot_features(step.schedule, rank=self._dp_rank, cost_model=self._calibration.prior)
        own = sets_the_pace(step.schedule, rank=self._dp_rank)
        if len(seconds) != step.num_microbatches:
            # Several model chunks: only the step as a whole is known.
            features, own = features.sum(axis=0, keepdims=True), own.all(keepdims=True)
        self._calibration.add(features[own], seconds=seconds[own])
