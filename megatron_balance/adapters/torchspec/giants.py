"""Chooses the samples of a pool that leave next in the cost of tokens: even batches, but giants leave together.

A *giant* costs more than a rank's even share of a batch: its rank is late in every plan. Giants side by side on several
ranks cost one wait, giants in different steps one each. Integers, ties by arrival.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate


def gather_giants(pool: Mapping[int, int], *, must: Sequence[int], count: int, dp_size: int) -> list[int]:
    """Giants wait until one of them must leave, and then all leave, the oldest first where they pass a batch.

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
