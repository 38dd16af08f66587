"""The items of the data loader: pulled ahead, and split into samples.

Megatron's rerun machine replays a step from the items that `RerunDataIterator` returned in it. Items are therefore
pulled from the source that this iterator wraps, and returned through it when their step begins: replay and checkpoints
see the same items as without pulling ahead.

Invariants: items come in the loader's order, each once, from the iterator that they were pulled from, even if another
iterator was used in between; an error of the loader is raised once, at its position among the items; after
`begin_fetch` no other thread receives an item before that fetch has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from megatron_balance.errors import BalanceError
from megatron_balance.runtime.failure import Failure, attempt
from megatron_balance.samples.padded_rows import with_row_lengths
from megatron_balance.samples.sample import Sample
from megatron_balance.samples.unpacking import RowError, split_packed, with_cu_seqlens


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
        self._waiting = Fetched([])
        self._lock = threading.Lock()

    def __next__(self) -> Any:
        """The next item: one pulled ahead, else from the source. Waits while another thread pulls."""
        with self._lock:
            waiting = self._waiting
            if waiting.items:
                return waiting.items.pop(0)
            if waiting.failure is not None:
                self._waiting = Fetched([])
                raise waiting.failure.error
            return next(self.source)

    @property
    def num_waiting(self) -> int:
        """Items pulled ahead and not returned yet; 0 once the source has ended, as they do not fill a step."""
        waiting = self._waiting
        return 0 if waiting.ended else len(waiting.items) + (waiting.failure is not None)

    def fetch(self, num_items: int) -> Fetched:
        """Pull until this many items wait to be returned."""
        with self._lock:
            if self._waiting.failure is None:
                self._waiting = pull(self.source, num_items, after=self._waiting.items)
            return replace(self._waiting, items=self._waiting.items[:num_items])


class Sources:
    """The iterators of a run, each with the items pulled ahead from it."""

    def __init__(self) -> None:
        self._known: list[PullAhead] = []

    def of(self, iterator: Any) -> tuple[Iterator[Any], PullAhead]:
        """The iterator to ask for a step's items, and where to pull the next step's. No fetch may be running.

        A `PullAhead` is put between Megatron's RerunDataIterator and its source. Iterators over the same source share
        one. One without waiting items is dropped when another iterator is passed.
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


@dataclass(frozen=True)
class SampleOrigin:
    """Positions in the data set of the items that one data-parallel rank loads, by Megatron's `single` sampler.

    It goes through the data set in order, from the first sample of the run or checkpoint: `micro_batch_size` samples,
    an item, to each data-parallel rank in turn. The order of other samplers is not known here.
    """

    first_sample: int
    micro_batch_size: int
    dp_rank: int
    dp_size: int

    def sample_of(self, item: int, *, row: int) -> int:
        """Index in the data set of a row of an item, which is counted from the loader's first on this rank."""
        return self.first_sample + (item * self.dp_size + self.dp_rank) * self.micro_batch_size + row


NOT_PACKED = (
    "the data has no cu_seqlens: rows of one fixed length, among which nothing can be balanced. Use packed (thd) data, "
    "such as --sft makes; add --balance-unpad where rows are padded at their end; or drop --use-dynamic-batch-size "
    "and --balance-data."
)


def split_items(
    items: Sequence[Any], *, unpad: int | str | None, origin: SampleOrigin | None, first_item: int
) -> list[Sample] | Failure:
    """The samples of a step's items on the CPU, or a failure that names the item, and its rows in the data set."""
    samples: list[Sample] = []
    for index, item in enumerate(items):
        of_item = attempt(_split, item, unpad=unpad)
        if isinstance(of_item, Failure):
            name = f"item {index} of this step"
            if origin is not None and isinstance(of_item.error, RowError):
                name += f" (in the data set: sample {origin.sample_of(first_item + index, row=of_item.error.row)})"
            return Failure(of_item.error, during=name)
        samples.extend(of_item)
    return samples


def _split(item: Any, *, unpad: int | str | None) -> list[Sample]:
    if not isinstance(item, Mapping):
        raise BalanceError(NOT_PACKED)
    item = with_cu_seqlens({key: value.cpu() if isinstance(value, Tensor) else value for key, value in item.items()})
    if item.get("cu_seqlens") is None:
        if unpad is None:
            raise BalanceError(NOT_PACKED)
        item = with_row_lengths(item, padding=unpad)
    return split_packed(item)
