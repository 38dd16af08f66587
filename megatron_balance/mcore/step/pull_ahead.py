"""Pulls the items of the next step from the data loader while this step runs.

Megatron's rerun machine replays a step from the items that `RerunDataIterator` returned in it. Items are therefore
pulled from the source that this iterator wraps, and returned through it when their step begins: replay and checkpoints
see the same items as without pulling ahead.

Invariants: items come in the loader's order, each once, from the iterator that they were pulled from, even if another
iterator was used in between; an error of the loader is raised once, at its position among the items; after
`begin_fetch` no other thread receives an item before that fetch has ended.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_balance.runtime.failure import Failure, attempt


@dataclass(frozen=True)
class Fetched:
    """Items of an iterator, and its error if it raised one.

    Attributes:
        items: fewer than requested if the iterator ended or failed.
        failure: the error raised instead of the next item; None without one, and at the end of the data.
    """

    items: list[Any]
    failure: Failure | None = None


class PullAhead(Iterator[Any]):
    """An iterator that another thread may fill.

    Args:
        source: iterator that yields the items.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self.source = source
        self._waiting: deque[Any] = deque()  # items; a Failure may be the last
        self._ended = False
        self._fetching = threading.Lock()  # acquired by `begin_fetch`, released by the fetching thread

    def __next__(self) -> Any:
        """The next item: one pulled ahead, else from the source. Waits for a fetch that was begun."""
        with self._fetching:
            if not self._waiting:
                return next(self.source)
            item = self._waiting.popleft()
        if isinstance(item, Failure):
            raise item.error
        return item

    @property
    def num_waiting(self) -> int:
        """Items pulled ahead and not returned yet; 0 once the source has ended, as they do not fill a step."""
        return 0 if self._ended else len(self._waiting)

    def begin_fetch(self) -> None:
        """Announce a `fetch` in another thread; no thread receives an item until it has ended."""
        self._fetching.acquire()

    def fetch(self, num_items: int) -> Fetched:
        """Pull until `num_items` items wait to be returned. Call `begin_fetch` first."""
        waiting = self._waiting
        try:
            while len(waiting) < num_items and not (waiting and isinstance(waiting[-1], Failure)):
                item = attempt(next, self.source)
                self._ended = isinstance(item, Failure) and isinstance(item.error, StopIteration)
                if self._ended:
                    break
                waiting.append(item)
        finally:
            self._fetching.release()
        return _fetched(list(waiting)[:num_items])


class Sources:
    """The iterators of a run, each with the items pulled ahead from it."""

    def __init__(self) -> None:
        self._known: list[PullAhead] = []

    def of(self, iterator: Any) -> tuple[Iterator[Any], PullAhead]:
        """Insert a `PullAhead` between an iterator and its source. No fetch may be running.

        Iterators over the same source share a `PullAhead`. One without waiting items is dropped when another iterator
        is passed.

        Args:
            iterator: the iterator that Megatron passes to a step, a RerunDataIterator or any other.

        Returns:
            The iterator to ask for this step's items, and where to pull the next step's.
        """
        replays = hasattr(iterator, "replaying") and hasattr(iterator, "iterable")
        source = iterator.iterable if replays else iterator
        ahead = source if isinstance(source, PullAhead) else None
        ahead = ahead or next((known for known in self._known if known.source is source), None) or PullAhead(source)
        self._known = [ahead, *(known for known in self._known if known is not ahead and known.num_waiting)]
        if not replays:
            return ahead, ahead
        iterator.iterable = ahead
        return iterator, ahead

    @property
    def num_left(self) -> int:
        """Items pulled ahead from earlier iterators, which wait until their iterator is passed again."""
        return sum(known.num_waiting for known in self._known[1:])


def next_items(iterator: Iterator[Any], num_items: int) -> Fetched:
    """The next items. Megatron's iterators have no `__iter__`."""
    items: list[Any] = []
    while len(items) < num_items:
        item = attempt(next, iterator)
        if isinstance(item, Failure):
            return _fetched(items if isinstance(item.error, StopIteration) else [*items, item])
        items.append(item)
    return Fetched(items)


def _fetched(items: list[Any]) -> Fetched:
    """Splits a failure at the end from the items before it."""
    if not items or not isinstance(items[-1], Failure):
        return Fetched(items)
    *items, failure = items
    return Fetched(items, Failure(failure.error, during=f"fetching item {len(items)} of this step"))
