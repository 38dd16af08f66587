"""What watches a run: times its micro-batches, tells its figures, records it.

Invariant: watching changes nothing of what is trained, and sends nothing but what `run_metrics.py` says.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

from megatron_balance.mcore.step.planner import BalancedStep
from megatron_balance.mcore.telemetry.recording import RunRecording
from megatron_balance.mcore.telemetry.run_metrics import RunMetrics
from megatron_balance.mcore.telemetry.step_timing import StepTiming


class RunObserver:
    """One rank's watchers.

    Args:
        timing: on a rank that reads data; None elsewhere.
        metrics: on a rank that takes part in the figures; None elsewhere.
        recording: under `--balance-record`, on the ranks that write; None elsewhere.
    """

    def __init__(
        self, *, timing: StepTiming | None, metrics: RunMetrics | None, recording: RunRecording | None
    ) -> None:
        self._timing = timing
        self._metrics = metrics
        self._recording = recording

    def begin(self, step: BalancedStep, *, iteration: int) -> None:
        """A step is about to run."""
        if self._timing is not None and step.schedule is not None:
            self._timing.begin(step.schedule, iteration=iteration)
        if self._metrics is not None:
            self._metrics.begin(step, iteration=iteration)
        if self._recording is not None:
            self._recording.begin(step, iteration=iteration)

    def forward(self, slot: int) -> AbstractContextManager[None]:
        """A forward pass of the micro-batch in this slot."""
        return contextlib.nullcontext() if self._timing is None else self._timing.forward(slot)

    def backward(self) -> AbstractContextManager[None]:
        """A backward pass; they come in the order of the forward passes."""
        return contextlib.nullcontext() if self._timing is None else self._timing.backward()

    def end(self) -> None:
        """The step's passes are over."""
        if self._timing is not None:
            self._timing.end()

    def logged(self, iteration: int) -> None:
        """Megatron has logged the step."""
        if self._timing is not None:
            self._timing.read_finished()
        if self._metrics is not None:
            self._metrics.logged(iteration)

    def flush(self) -> None:
        """The run ends or saves a checkpoint: write what has not been written."""
        if self._timing is not None:
            self._timing.read_finished()
        if self._recording is not None:
            self._recording.flush()
