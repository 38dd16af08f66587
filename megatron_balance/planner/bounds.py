"""Lower bounds on the time of any plan of a global batch. Each is sound, never above the best plan, on integers.

mean        the work of all, spread evenly over all ranks
largest     one sample, with its part of shared work, runs whole on one rank
pigeonhole  among the k*D + 1 costliest samples some of D ranks holds k + 1
forced      at most k samples heavier than cap/(k+1) share a micro-batch, so that the i highest rows of e ranks hold
            at most k*i*e of them, and the next row is at least as high as the costliest left over. What the i
            highest rows cannot hold is spread evenly over all rows.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from megatron_balance.planner.batch import Batch
from megatron_balance.planner.dynamic_cp import SizedBatch
from megatron_balance.planner.inputs import Ints

MOST_SHARING = 4
"""Forced heights look at samples of which at most this many share a micro-batch."""


def least_rows(batch: Batch) -> int:
    """Micro-batches that every rank needs at least, a multiple of `batch.multiple`.

    They hold all weight, and at most k samples heavier than cap/(k+1) each.
    """
    inside = batch.weights[batch.weights <= batch.cap]
    heavy = [-(-int(((most + 1) * inside > batch.cap).sum()) // most) for most in range(1, MOST_SHARING + 1)]
    bins = batch.oversized.size + max(-(-int(inside.sum()) // batch.cap), *heavy)
    return max(-(-bins // (batch.num_ranks * batch.multiple)), 1) * batch.multiple


def least_work(batch: Batch) -> int:
    """Work of the slowest group at least, over all stages together and without `launch`."""
    own, shared = batch.costs.sum(axis=0), int(batch.shared.sum())
    total = int(own.sum())
    work = max(-(-(total + shared) // batch.num_ranks), _largest(batch))
    if batch.span == 1:
        return max(work, _pigeonhole(own, num_parts=batch.num_ranks))
    # Ranks that wait for the costliest sample may compute shared work of a smaller group meanwhile.
    beside = shared if batch.span == batch.expert_span else 0
    return max(work, -(-(_with_forced_rows(batch, own) + beside) // batch.num_ranks))


def least_time(batch: Batch, *, work: int, rows: int) -> int:
    """A time that no plan with this many micro-batches or more can beat. `work`: `least_work`."""
    longest = _largest(batch) + batch.launch
    return batch.waiting.at_least(work + rows * batch.launch, launch=batch.launch, longest=longest)


def lower_bound(batch: Batch | SizedBatch) -> int:
    """A time that no plan which may move samples can beat."""
    if isinstance(batch, SizedBatch):
        return batch.waiting.at_least(batch.least_work(), launch=batch.launch)
    return least_time(batch, work=least_work(batch), rows=least_rows(batch))


def single_sample_floor(batch: Batch | SizedBatch) -> float:
    """The largest sample over a rank's even share, at least 1.0: the rank of that sample ends last in every plan.

    With sizes of their own the sample counts at its cheapest size, and the share is of the least work.
    """
    if isinstance(batch, SizedBatch):
        largest = int(batch.at(batch.costs, batch.cheapest).max(initial=0))
        total, num_ranks = (
            int((batch.at(batch.costs, batch.least_levels) << batch.least_levels).sum()),
            batch.num_leaves,
        )
    else:
        own = batch.costs.sum(axis=0)
        largest, total, num_ranks = int(own.max(initial=0)), int(own.sum()), batch.num_ranks
    return max(1.0, largest * num_ranks / total) if total else 1.0


def _largest(batch: Batch) -> int:
    return int((batch.costs.sum(axis=0) + -(-batch.shared // batch.expert_span)).max(initial=0))


def _pigeonhole(costs: Ints, *, num_parts: int) -> int:
    """Max over k of the k+1 smallest of the k*num_parts + 1 costliest."""
    falling = np.sort(costs)[::-1]
    totals = np.concatenate([[0], np.cumsum(falling)])
    ends = np.arange(num_parts + 1, costs.size + 1, num_parts)
    held = np.arange(2, ends.size + 2)
    return int((totals[ends] - totals[ends - held]).max(initial=0))


def _with_forced_rows(batch: Batch, own: Ints) -> int:
    """Own cost of all samples plus what ranks idle beside rows that large samples force to be high."""
    total, span, cap = int(own.sum()), batch.span, batch.cap
    order = np.argsort(-own, kind="stable")
    costs, weights = own[order], batch.weights[order].clip(max=cap)
    forced = costs[:1]
    for most in range(1, MOST_SHARING + 1):
        heights = costs[(most + 1) * weights > cap][:: most * span]
        short, long = sorted((forced, heights), key=len)
        forced = np.concatenate([np.maximum(short, long[: short.size]), long[short.size :]])
    rooms = span * cap * np.arange(forced.size + 1)
    held = _most_cost(costs, weights, rooms)
    return max(
        span * height + total - most_held
        for height, most_held in zip(accumulate(forced.tolist(), initial=0), held, strict=True)
    )


def _most_cost(costs: Ints, weights: Ints, rooms: Ints) -> list[int]:
    """The most cost that each of some rooms can hold, samples cut freely: a fractional knapsack, rounded up."""
    # Cost for each unit of weight, with as many bits behind the point as int64 has left.
    bits = max(61 - int(costs.max(initial=0)).bit_length(), 0)
    density = np.where(weights > 0, (costs << bits) // np.maximum(weights, 1), np.iinfo(np.int64).max)
    order = np.argsort(-density, kind="stable")
    costs, weights = costs[order], weights[order]
    cost_before, weight_before = ([0, *np.cumsum(values).tolist()] for values in (costs, weights))
    cut: list[int] = np.searchsorted(np.cumsum(weights), rooms, side="right").tolist()
    # Samples whose densities differ behind these bits may stand in the wrong order.
    slack = (weight_before[-1] >> bits) + 1
    held: list[int] = []
    for room, index in zip(rooms.tolist(), cut, strict=True):
        cost = cost_before[index]
        if index < costs.size:
            cost += -(-(room - weight_before[index]) * int(costs[index]) // int(weights[index])) + slack
        held.append(min(cost, cost_before[-1]))
    return held
