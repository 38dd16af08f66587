"""Chooses the samples of the pool that leave in the next dispatch (approach B).

    1. the oldest `window * dispatch_batch_size` samples are looked at
    2. those that are `MAX_DELAY_WINDOWS * window` dispatches late leave; there are few
    3. the oldest sample leaves
    4. with it leaves the run of neighbours in the order of length that pads the least

Invariants: every sample leaves exactly once, at most `max_delay` dispatches after its turn in order of arrival; what
leaves depends on lengths and order of arrival alone. Arrival numbers are kept in a queue beside the controller's pool,
and both are rearranged in the same way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any

MAX_DELAY_WINDOWS = 2
"""A sample leaves at most two windows late. Without a bound it could wait for all samples that were in the pool before
it. The bound costs 5 % of the step at a window of 2 and micro_batch_size 4, and 2 % or less elsewhere."""


class DispatchWindow:
    """Tracks the order of arrival of the controller's pool, and chooses what leaves it.

    Args:
        window: number of dispatches' worth of samples to choose among.
        dispatch_batch_size: samples of a dispatch, over all ranks.

    Attributes:
        capacity: samples to choose among.
        max_delay: dispatches that a sample leaves after its turn in order of arrival, at most.
        max_delay_seen: the latest so far.
    """

    def __init__(self, window: int, *, dispatch_batch_size: int) -> None:
        self.capacity = window * dispatch_batch_size
        self.max_delay = MAX_DELAY_WINDOWS * window
        self.max_delay_seen = 0
        self._batch_size = dispatch_batch_size
        self._arrivals: deque[int] = deque()
        self._num_arrived = 0
        self._num_dispatches = 0
        self._sum_delay = 0

    def arrange(self, pool: deque[Any], *, lengths: Sequence[int]) -> None:
        """Bring the samples that leave next to the front of the pool, oldest first.

        Args:
            pool: the controller's samples. New ones were added at its end.
            lengths: `[len(pool)]` tokens.
        """
        while len(self._arrivals) > len(pool):
            self._arrivals.popleft()  # Evaluation took samples from the front, as a dispatch does.
        newest = self._num_arrived + len(pool) - len(self._arrivals)
        self._arrivals.extend(range(self._num_arrived, newest))
        self._num_arrived = newest

        position_of = {arrival: position for position, arrival in enumerate(self._arrivals)}
        seen = sorted(position_of)[: self.capacity]
        candidates = {arrival: lengths[position_of[arrival]] for arrival in seen}
        leaving = seen if len(seen) <= self._batch_size else sorted(self._choose(candidates))
        positions = [position_of[arrival] for arrival in leaving]
        _bring_to_front(pool, positions=positions)
        _bring_to_front(self._arrivals, positions=positions)

    def leave(self) -> None:
        """Note that the samples at the front have left."""
        left = [self._arrivals.popleft() for _ in range(min(self._batch_size, len(self._arrivals)))]
        delays = [max(self._num_dispatches - arrival // self._batch_size, 0) for arrival in left]
        self.max_delay_seen = max(self.max_delay_seen, *delays)
        self._sum_delay += sum(delays)
        self._num_dispatches += 1

    @property
    def mean_delay(self) -> float:
        """Mean over all samples that left; one that left early counts as 0."""
        return self._sum_delay / max(self._num_dispatches * self._batch_size, 1)

    def _choose(self, lengths: dict[int, int]) -> list[int]:
        """Arrival numbers of the next dispatch, in any order."""
        count, oldest = self._batch_size, min(lengths)
        late = [arrival for arrival in lengths if arrival // count + self.max_delay <= self._num_dispatches][:count]
        # The oldest is the first to be late.
        others = late[1:]
        free = {arrival: length for arrival, length in lengths.items() if arrival not in others}
        return [*others, *_tightest_run(free, around=oldest, count=count - len(others))]


def _tightest_run(lengths: dict[int, int], *, around: int, count: int) -> list[int]:
    """The run of `count` neighbours in the order of length that holds one sample and pads least for its tokens."""
    order = sorted(lengths, key=lambda arrival: (-lengths[arrival], arrival))
    place = order.index(around)
    sums = [0, *accumulate(lengths[arrival] for arrival in order)]
    starts = range(max(place - count + 1, 0), min(place, len(order) - count) + 1)
    start = min(starts, key=lambda first: Fraction(lengths[order[first]], max(sums[first + count] - sums[first], 1)))
    return order[start : start + count]


def _bring_to_front(queue: deque[Any], *, positions: Sequence[int]) -> None:
    """Move the entries at these positions to the front, in the order given; the others keep theirs."""
    entries = [queue[position] for position in positions]
    for position in sorted(positions, reverse=True):
        del queue[position]
    queue.extendleft(reversed(entries))
