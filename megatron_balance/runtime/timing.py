"""Times the micro-batches of one step without synchronizing the device.

On a GPU a mark is an event in the stream that computes, read once the GPU has passed it; on a CPU it is the
thread's own CPU time, which other jobs of the machine do not lengthen.

Invariant: a forward pass without its backward pass is not reported.
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
    """Forward and backward passes of one step on this rank.

    Args:
        on_gpu: True if the passes run on a GPU.
    """

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._forward: list[tuple[int, Any, Any]] = []
        self._backward: list[tuple[Any, Any]] = []

    @contextlib.contextmanager
    def forward(self, slot: int) -> Iterator[None]:
        """Times one forward pass of the micro-batch in this slot."""
        start = self._mark()
        yield
        self._forward.append((slot, start, self._mark()))

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Times one backward pass; they come in the order of the forward passes."""
        start = self._mark()
        yield
        self._backward.append((start, self._mark()))

    @property
    def finished(self) -> bool:
        """True if the device has passed the last mark; does not wait."""
        return not self._on_gpu or all(end.query() for end in self._last_marks())

    def seconds(self, num_microbatches: int) -> NDArray[np.float64] | None:
        """Forward and backward together.

        Args:
            num_microbatches: of the step.

        Returns:
            `[num_microbatches]` seconds; or `[1]`, their sum, where a rank holds several model chunks, whose
            backward passes come in another order; None where a pass was not measured.
        """
        if not self._forward or len(self._forward) != len(self._backward):
            return None
        slots = np.array([slot for slot, _, _ in self._forward])
        forward = np.array([self._between(start, end) for _, start, end in self._forward])
        backward = np.array([self._between(start, end) for start, end in self._backward])
        if len(slots) != num_microbatches:
            return np.array([forward.sum() + backward.sum()])
        return (forward + backward)[np.argsort(slots, kind="stable")]

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.thread_time()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) / 1e3 if self._on_gpu else end - start

    def _last_marks(self) -> list[Any]:
        passes = [self._forward[-1][1:] if self._forward else (), self._backward[-1] if self._backward else ()]
        return [marks[-1] for marks in passes if marks]
