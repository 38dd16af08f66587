"""Chooses the samples of the pool that leave in the next dispatch (approach B).

    1. the oldest `window * dispatch_batch_size` samples are looked at
    2. those that are `MAX_DELAY_WINDOWS * window` dispatches late leave; there are few
    3. the oldest sample leaves
    4. padded: with it the run of neighbours in the order of length that pads the least
       tokens: with it samples that make this dispatch like the next ones (`gather_giants`)

Invariants: every sample leaves exactly once, at most `max_delay` dispatches after its turn in order of arrival; what
leaves depends on lengths and order of arrival alone. Arrival numbers are kept in a queue beside the controller's pool,
and both are rearranged in the same way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Any

MAX_DELAY_WINDOWS = 2
"""A sample leaves at most two windows late. Without a bound it could wait for all samples that were in the pool before
it. The bound costs 5 % of the step at a window of 2 and micro_batch_size 4, and 2 % or less elsewhere."""


@dataclass(frozen=True)
class DelayMetrics:
    """Delays caused by choosing so far, in dispatches.

    Attributes:
        num_dispatches: dispatches that left.
        max_delay: the latest that a sample left after its turn in order of arrival.
        mean_delay: mean over all samples that left; one that left early counts as 0.
    """

    num_dispatches: int
    max_delay: int
    mean_delay: float


class DispatchWindow:
    """Tracks the order of arrival of the controller's pool, and chooses what leaves it.

    Args:
        window: number of dispatches' worth of samples to choose among.
        dispatch_batch_size: samples of a dispatch, over all ranks.
        dp_size: ranks.
        cost: `padded` or `tokens`.
    """

    def __init__(self, window: int, *, dispatch_batch_size: int, dp_size: int, cost: str) -> None:
        self.capacity = window * dispatch_batch_size
        self.max_delay = MAX_DELAY_WINDOWS * window
        self._batch_size = dispatch_batch_size
        self._dp_size = dp_size
        self._cost = cost
        self._arrivals: deque[int] = deque()
        self._num_arrived = 0
        self._num_dispatches = 0
        self._max_delay_seen = 0
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
        self._max_delay_seen = max(self._max_delay_seen, *delays)
        self._sum_delay += sum(delays)
        self._num_dispatches += 1

    def metrics(self) -> DelayMetrics:
        """Delays so far."""
        return DelayMetrics(
            num_dispatches=self._num_dispatches,
            max_delay=self._max_delay_seen,
            mean_delay=self._sum_delay / max(self._num_dispatches * self._batch_size, 1),
        )

    def _choose(self, lengths: dict[int, int]) -> list[int]:
        """Arrival numbers of the next dispatch, in any order."""
        count, oldest = self._batch_size, min(lengths)
        late = [arrival for arrival in lengths if arrival // count + self.max_delay <= self._num_dispatches][:count]
        if self._cost == "tokens":
            return gather_giants(lengths, must=late or [oldest], count=count, dp_size=self._dp_size)
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


def gather_giants(pool: Mapping[int, int], *, must: Sequence[int], count: int, dp_size: int) -> list[int]:
    """Chooses a batch in the cost of tokens: even batches, but giants leave together.

    A *giant* costs more than a rank's even share of a batch: its rank is late in every plan. Giants side by side on
    several ranks cost one wait, giants in different steps one each. They wait until one of them must leave; then all
    leave, the oldest first where they pass a batch. Integers, ties by arrival.

    Args:
        pool: arrival number → cost, more than `count` samples.
        must: those that leave now, at most `count`.
        count: samples of a batch.
        dp_size: ranks.

    Returns:
        `count` arrival numbers in any order.
    """
    # A cost above total / len(pool) * count / dp_size, without a fraction.
    bar, scale = sum(pool.values()) * count, len(pool) * dp_size
    giants = {arrival: cost for arrival, cost in pool.items() if dp_size > 1 and cost * scale > bar}
    if not giants.keys().isdisjoint(must):
        must = list(dict.fromkeys([*must, *sorted(giants)]))[:count]
    elif len(pool) - len(giants) >= count:
        pool = {arrival: cost for arrival, cost in pool.items() if arrival not in giants}
    return _spread_evenly(pool, must=must, count=count, dp_size=dp_size)


def _spread_evenly(pool: Mapping[int, int], *, must: Sequence[int], count: int, dp_size: int) -> list[int]:
    """A batch that looks like the pool: its total cost and its spread of costs.

    The pool is sorted by cost and cut into `count` strata. From the costliest on, each gives one sample: the one that
    brings the sum so far nearest to the pool's mean.
    """
    order = sorted(pool, key=lambda arrival: (-pool[arrival], arrival))
    sums = [0, *accumulate(pool[arrival] for arrival in order)]
    starts = [stratum * len(order) // count for stratum in range(count + 1)]
    fixed = _strata_of_must(order, must=frozenset(must), count=count)
    chosen: list[int] = []
    total = 0
    for stratum, (start, stop) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        arrival = fixed.get(stratum)
        if arrival is None:
            # The mean of the samples so far, times len(order); strata with one of `must` leave an error to correct.
            goal = sums[stop] * count - total * len(order)
            arrival = min(order[start:stop], key=lambda a: (abs(goal - pool[a] * len(order)), a))
        chosen.append(arrival)
        total += pool[arrival]
    return chosen


def _strata_of_must(order: Sequence[int], *, must: frozenset[int], count: int) -> dict[int, int]:
    """A stratum for each of `must`: the one it lies in, else the next free one, from the end backwards.

    A free stratum contains none of `must`: the first of them would have taken it.
    """
    strata: list[int] = []
    fixed = [(position, arrival) for position, arrival in enumerate(order) if arrival in must]
    for position, _ in fixed:
        own = ((position + 1) * count - 1) // len(order)
        strata.append(max(own, strata[-1] + 1) if strata else own)
    for index in range(len(strata)):
        strata[index] = min(strata[index], count - len(strata) + index)
    return {stratum: arrival for stratum, (_, arrival) in zip(strata, fixed, strict=True)}
