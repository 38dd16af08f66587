"""The iterators of a run, each with the items pulled ahead from it, and the thread that prepares a step.

Megatron's rerun machine replays a step from the items that `RerunDataIterator` returned in it. Items are therefore
pulled from the source that this iterator wraps, and returned through it when their step begins.

Invariant: an item that was pulled ahead is returned by its own iterator, once, and an error of the iterator at its
position among the items.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import torch

from megatron_balance.runtime.failure import Failure, attempt
from megatron_balance.runtime.process import close_on_undo

Result = TypeVar("Result")


def pull(iterator: Iterator[Any], num_items: int) -> list[Any]:
    """The next items; where one cannot be had its Failure is the last. Megatron's iterators have no `__iter__`."""
    items: list[Any] = []
    while len(items) < num_items:
        item = attempt(next, iterator)
        if isinstance(item, Failure):
            return [*items, replace(item, during=f"fetching item {len(items)} of this step")]
        items.append(item)
    return items


class PullAhead(Iterator[Any]):
    """An iterator that another thread may fill."""

    def __init__(self, source: Iterator[Any]) -> None:
        self.source = source
        self._queue: list[Any] = []
        self._lock = threading.Lock()

    def __next__(self) -> Any:
        """The next item: one pulled ahead, else from the source. Waits while another thread pulls."""
        with self._lock:
            item = self._queue.pop(0) if self._queue else next(self.source)
        if isinstance(item, Failure):
            raise item.error
        return item

    @property
    def num_queued(self) -> int:
        """Items pulled ahead and not returned yet; 0 once the source has ended, as they do not fill a step."""
        queue = self._queue
        has_ended = queue and isinstance(queue[-1], Failure) and isinstance(queue[-1].error, StopIteration)
        return 0 if has_ended else len(queue)

    def fetch(self, num_items: int) -> list[Any]:
        """The next items, which stay in the queue, as `pull` returns them."""
        with self._lock:
            if not (self._queue and isinstance(self._queue[-1], Failure)):
                self._queue += pull(self.source, num_items - len(self._queue))
            return self._queue[:num_items]


def step_thread() -> ThreadPoolExecutor:
    """The thread of a rank that prepares steps while others run, for training and evaluation.

    On a GPU it has the device of the thread that made it, where a loader's `.cuda()` belongs, and a stream of its own:
    else copies to the host wait for the step's kernels.
    """
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def begin() -> None:
        if device is not None:
            torch.cuda.set_device(device)
            torch.cuda.set_stream(torch.cuda.Stream())

    thread = ThreadPoolExecutor(1, "megatron_balance", initializer=begin)
    close_on_undo(thread.shutdown)
    return thread


def submit(thread: ThreadPoolExecutor, job: Callable[[], Result]) -> Future[Result]:
    """Queue a job. On a GPU its stream follows what is on the caller's now, which may still compute the items."""
    if not torch.cuda.is_available():
        return thread.submit(job)
    event = torch.cuda.Event()
    event.record()

    def follow() -> Result:
        torch.cuda.current_stream().wait_event(event)
        return job()

    return thread.submit(follow)
