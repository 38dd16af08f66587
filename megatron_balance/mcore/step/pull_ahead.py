"""Pulls the items of the next step from the data loader while this step runs.

Megatron's rerun machine replays a step from what `RerunDataIterator` handed out in it. So items are pulled
ahead behind that iterator, from what it iterates over, and handed out through it when their step begins:
replaying and checkpointing see what they would have seen.

Invariants: items come in the loader's order, each once, from the iterator that they were pulled from, also where
another iterator came in between; what the loader raises comes once, in its place among the items; what a thread was
told to fetch it gets, however early another thread asks for the next item.
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
    """What an iterator yielded.

    Attributes:
        items: fewer than were wanted where the iterator has ended or failed.
        failure: what it raised in place of the next item; None where it ended, or did not.
    """

    items: list[Any]
    failure: Failure | None = None


class PullAhead(Iterator[Any]):
    """An iterator that another thread may fill.

    Args:
        source: what yields the items.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self.source = source
        self._waiting: deque[Any] = deque()  # items; a Failure may be the last
        self._ended = False
        self._fetching = threading.Lock()  # taken by the thread that starts another, given back by that one

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
        """Items pulled ahead that were not handed out; 0 once the source has ended: they did not fill a step."""
        return 0 if self._ended else len(self._waiting)

    def begin_fetch(self) -> None:
        """Announce a `fetch` that another thread will do; until it has, no thread gets an item."""
        self._fetching.acquire()

    def fetch(self, num_items: int) -> Fetched:
        """Pull until `num_items` are there, and leave them to be handed out. Announce it first."""
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
    """The iterators of a run, each with what was pulled ahead from it."""

    def __init__(self) -> None:
        self._known: list[PullAhead] = []

    def of(self, iterator: Any) -> tuple[Iterator[Any], PullAhead]:
        """Put a `PullAhead` where items can be pulled without being handed out. No fetch may be under way.

        An iterator over the same source as an earlier one shares its `PullAhead`. One of which no item waits is
        forgotten when another comes.

        Args:
            iterator: what Megatron passes to a step: a RerunDataIterator, or any other iterator.

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
        """Items pulled ahead from iterators before the newest one, which wait for theirs to come again."""
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
    """A failure at the end does not hide the items before it."""
    if not items or not isinstance(items[-1], Failure):
        return Fetched(items)
    *items, failure = items
    return Fetched(items, Failure(failure.error, during=f"fetching item {len(items)} of this step"))
