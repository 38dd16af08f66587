"""Items of the next step, pulled from the data loader while this step runs.

Megatron's rerun machine replays a step from what `RerunDataIterator` handed out in it. So items are pulled
ahead behind that iterator, from what it iterates over, and handed out through it when their step begins:
replaying and checkpointing see what they would have seen.

Invariants: items come in the loader's order, each once; what a thread was told to fetch it gets, however
early somebody else asks for the next item.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any


class PullAhead(Iterator[Any]):
    """An iterator that another thread may fill.

    Args:
        source: what yields the items.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self._buffer: deque[Any] = deque()
        self._fetching = threading.Lock()  # taken by the thread that starts another, given back by that one

    def __next__(self) -> Any:
        """The next item: one pulled ahead, else from the source. Waits for a fetch that was begun."""
        with self._fetching:
            return self._buffer.popleft() if self._buffer else next(self._source)

    def begin_fetch(self) -> None:
        """Announce a `fetch` that another thread will do; until it has, nobody gets an item."""
        self._fetching.acquire()

    def fetch(self, num_items: int) -> list[Any]:
        """Pull until `num_items` are there, and leave them to be handed out. Announce it first.

        Returns:
            The next items; fewer where the source has ended.
        """
        try:
            while len(self._buffer) < num_items:
                self._buffer.append(next(self._source))
        except StopIteration:
            pass
        finally:
            self._fetching.release()
        return list(self._buffer)[:num_items]


def next_items(iterator: Iterator[Any], num_items: int) -> list[Any]:
    """The next items; fewer where the iterator has ended. Megatron's have no `__iter__`."""
    items: list[Any] = []
    try:
        while len(items) < num_items:
            items.append(next(iterator))
    except StopIteration:
        pass
    return items


def pull_ahead_of(iterator: Any) -> tuple[Iterator[Any], PullAhead]:
    """Put a `PullAhead` where items can be pulled without being handed out.

    Args:
        iterator: what Megatron passes to a step: a RerunDataIterator, or any other iterator.

    Returns:
        The iterator to ask for this step's items, and where to pull the next step's.
    """
    if isinstance(iterator, PullAhead):
        return iterator, iterator
    if not hasattr(iterator, "iterable"):
        ahead = PullAhead(iterator)
        return ahead, ahead
    if not isinstance(iterator.iterable, PullAhead):
        iterator.iterable = PullAhead(iterator.iterable)
    return iterator, iterator.iterable
