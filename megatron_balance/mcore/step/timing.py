"""The seconds of the passes of a step on one rank, between marks in its stream of work; the device never waits.

They include what a pass waits for (all-to-all, parameters of FSDP, tensor- and context-parallel peers), so that ranks
which meet in a micro-batch look more even than they are, and exclude pipeline neighbours, gradient reduction and
optimizer.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


class StepTimer:
    """Forward and backward passes of one step; one without the other is not reported.

    On a GPU marks are events in the stream that computes; else the thread's own CPU time, which other jobs of the
    machine do not lengthen.
    """

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._passes: list[tuple[int | None, Any, Any]] = []

    @contextlib.contextmanager
    def timed(self, slot: int | None) -> Iterator[None]:
        """Times a forward pass of the micro-batch in this slot, or without one a backward pass, in the same order."""
        start = self._mark()
        yield
        self._passes.append((slot, start, self._mark()))

    @property
    def finished(self) -> bool:
        """True if the device has passed the last mark; does not wait."""
        return not self._on_gpu or not self._passes or self._passes[-1][-1].query()

    def seconds(self, num_microbatches: int) -> NDArray[np.float64] | None:
        """Forward and backward together: `[num_microbatches]`, or None where a pass was not measured.

        `[1]`, their sum, where a rank holds several model chunks, whose backward passes come in another order.
        """
        took = [
            (slot, start.elapsed_time(end) / 1e3 if self._on_gpu else end - start) for slot, start, end in self._passes
        ]
        forward = [(slot, seconds) for slot, seconds in took if slot is not None]
        backward = [seconds for slot, seconds in took if slot is None]
        if not forward or len(forward) != len(backward):
            return None
        both = sorted((slot, there + back) for (slot, there), back in zip(forward, backward, strict=True))
        of_each = np.array([seconds for _, seconds in both])
        return of_each if len(both) == num_microbatches else of_each.sum(keepdims=True)

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.thread_time()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
