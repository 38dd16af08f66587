"""The iterators of a run, each with the items pulled ahead from it, and the thread that prepares a step.

Megatron's rerun machine replays a step from the items that `RerunDataIterator` returned in it. Items are therefore
pulled from the source that this iterator wraps, and returned through it when their step begins.

Invariant: an item that was pulled ahead is returned by its own iterator, once, and an error of the iterator at its
position among the items.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from megatron_balance.runtime.failure import Failure, attempt
from megatron_balance.runtime.process import close_on_undo

Result = TypeVar("Result")


@dataclass(frozen=True)
class Fetched:
    """Items of an iterator; fewer than wanted where it raised an error in place of the next, as it does at its end."""

    items: list[Any]
    failure: Failure | None = None

    @property
    def ended(self) -> bool:
        """True if the iterator has no more items."""
        return self.failure is not None and isinstance(self.failure.error, StopIteration)


def pull(iterator: Iterator[Any], num_items: int, *, after: Sequence[Any] = ()) -> Fetched:
    """The items before, and as many more as are missing. Megatron's iterators have no `__iter__`."""
    items = list(after)
    while len(items) < num_items:
        item = attempt(next, iterator)
        if isinstance(item, Failure):
            return Fetched(items, replace(item, during=f"fetching item {len(items)} of this step"))
        items.append(item)
    return Fetched(items)


class PullAhead(Iterator[Any]):
    """An iterator that another thread may fill."""

    def __init__(self, source: Iterator[Any]) -> None:
        self.source = source
        self._queue = Fetched([])
        self._lock = threading.Lock()

    def __next__(self) -> Any:
        """The next item: one pulled ahead, else from the source. Waits while another thread pulls."""
        with self._lock:
            queue = self._queue
            if queue.items:
                return queue.items.pop(0)
            if queue.failure is not None:
                self._queue = Fetched([])
                raise queue.failure.error
            return next(self.source)

    @property
    def num_queued(self) -> int:
        """Items pulled ahead and not returned yet; 0 once the source has ended, as they do not fill a step."""
        queue = self._queue
        return 0 if queue.ended else len(queue.items) + (queue.failure is not None)

    def fetch(self, num_items: int) -> Fetched:
        """Pull until this many items are queued."""
        with self._lock:
            if self._queue.failure is None:
                self._queue = pull(self.source, num_items, after=self._queue.items)
            return replace(self._queue, items=self._queue.items[:num_items])


class IteratorCache:
    """The iterators of a run, the newest first."""

    def __init__(self) -> None:
        self._iterators: list[PullAhead] = []

    def wrap(self, iterator: Any) -> tuple[Iterator[Any], PullAhead]:
        """The iterator to ask for a step's items, and where to pull the next step's. No fetch may be running.

        A `PullAhead` takes the place of the source in Megatron's RerunDataIterator, for good. Iterators over one source
        share it; one without queued items is dropped when another iterator is passed.
        """
        replays = hasattr(iterator, "replaying") and hasattr(iterator, "iterable")
        source = iterator.iterable if replays else iterator
        ahead = source if isinstance(source, PullAhead) else None
        ahead = (
            ahead or next((cached for cached in self._iterators if cached.source is source), None) or PullAhead(source)
        )
        self._iterators = [ahead, *(cached for cached in self._iterators if cached is not ahead and cached.num_queued)]
        if not replays:
            return ahead, ahead
        iterator.iterable = ahead
        return iterator, ahead

    @property
    def num_left(self) -> int:
        """Items pulled ahead from earlier iterators, which wait until their iterator is passed again."""
        return sum(iterator.num_queued for iterator in self._iterators[1:])


class StepThread:
    """The thread of a rank that prepares steps while others run, for training and evaluation.

    On a GPU it has the device of the thread that made it, where a loader's `.cuda()` belongs, and a stream of its own,
    which follows what was on the other when a job was submitted: else copies to the host wait for the step's kernels.
    """

    def __init__(self) -> None:
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._on_gpu = device is not None
        self._executor = ThreadPoolExecutor(1, "megatron_balance", initializer=_set_device, initargs=(device,))
        self._newest: Future[Any] | None = None
        close_on_undo(self._executor.shutdown)

    def submit(self, job: Callable[[], Result]) -> Future[Result]:
        """Queue a job."""
        event = torch.cuda.Event() if self._on_gpu else None
        if event is not None:
            event.record()

        def follow() -> Result:
            if event is not None:
                torch.cuda.current_stream().wait_event(event)
            return job()

        self._newest = future = self._executor.submit(follow)
        return future

    def finish(self) -> None:
        """Wait until it has nothing to do; errors are raised where results are asked for."""
        if self._newest is not None:
            wait([self._newest])


def _set_device(device: int | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream())
