"""Local search on a packing: the best move or swap that relieves the slowest group, again and again.

A move is a swap with a ghost: every bin offers one, which costs and weighs nothing. Each round compares all pairs at
once and ends where no pair helps, or where the pairs compared are enough, so that the end does not depend on the speed
of the machine. No bin gets heavier than the cap, none is emptied, and the slowest group never gets slower.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from megatron_balance.planner.batch import Batch, sums
from megatron_balance.planner.inputs import NEVER, Ints

MAX_PAIRS = 1_000_000
"""Pairs that one search compares at most."""

PARTNERS = 16
"""Groups, or bins of a single row, that samples are exchanged with: those with least work."""


def even_parts(batch: Batch, bin_of: Ints, rows: int) -> Ints:
    """Every row polished by itself: it lasts as long as its highest encoder part and its highest language part."""
    bin_of, row_of = bin_of.copy(), bin_of // batch.span
    one_row = replace(batch, num_ranks=batch.span, expert_span=1)
    order = np.argsort(row_of, kind="stable")
    for ids in np.split(order, np.flatnonzero(np.diff(row_of[order])) + 1):
        first = bin_of[ids] // batch.span * batch.span
        bin_of[ids] = first + polish(one_row.take(ids), bin_of[ids] - first, 1)
    return bin_of


def polish(batch: Batch, bin_of: Ints, rows: int, *, goal: int = 0) -> Ints:
    """Lowers the time of the slowest group, down to `goal`. `bin_of`: `(group * rows + row) * span + column`.

    Rows add up; shared work counts where the whole row shares it.
    """
    (parts, n), span, groups = batch.costs.shape, batch.span, batch.num_groups
    bins = batch.num_ranks * rows
    cost = np.concatenate([batch.costs, np.zeros((parts, bins), dtype=np.int64)], axis=1)
    weight = np.concatenate([batch.weights, np.zeros(bins, dtype=np.int64)])
    shared = np.zeros(n + bins, dtype=np.int64)
    if batch.expert_span == span:
        shared[:n] = batch.shared
    elif span == 1:  # ranks of an expert group even out what they share as if it were their own
        cost[0, :n] += batch.shared
    place: Ints = np.concatenate([bin_of, np.arange(bins)])
    height: Ints = np.stack([sums(part, bin_of, bins) for part in cost[:, :n]])
    room = batch.cap - sums(batch.weights, bin_of, bins)
    count = np.bincount(bin_of, minlength=bins)
    pairs = 0
    while n:
        if parts == 1 and span > 1:  # bins of each group stand by falling cost, cut into rows
            old = np.argsort(-height[0].reshape(groups, -1), axis=1, kind="stable")
            old = (old + np.arange(groups)[:, None] * (rows * span)).reshape(-1)
            new = np.argsort(old)
            place, height, room, count = new[place], height[:, old], room[old], count[old]
        cells = height.reshape(parts, -1, span)
        top = np.argsort(-cells, axis=2, kind="stable")[:, :, :3]
        high = np.take_along_axis(cells, top, axis=2)
        # Times are in units of 1/span of a cost, so that shared costs stay whole.
        row_times = span * high[:, :, 0].sum(axis=0) + sums(shared, place // span, groups * rows)
        times = row_times.reshape(groups, rows).sum(axis=1)
        slow = int(times.argmax())
        own_rows = np.arange(slow * rows, (slow + 1) * rows)
        is_highest = np.zeros(bins, dtype=np.bool_)
        is_highest[(top[:, own_rows, 0] + own_rows * span).reshape(-1)] = True
        movable = room[place] >= 0
        items = np.flatnonzero(is_highest[place[:n]] & movable[:n])
        others = np.flatnonzero(_partners(height, times, slow=slow, span=span)[place] & movable)
        pairs += items.size * others.size
        if not items.size or pairs > MAX_PAIRS or times[slow] <= span * goal:
            break
        one, other = place[items][:, None], place[others][None]
        extra = weight[items][:, None] - weight[others]
        allowed = (one != other) & (extra <= room[other]) & (-extra <= room[one])
        allowed &= (others < n) | (count[one] > 1)
        from_row, to_row = one // span, other // span
        same = from_row == to_row
        lowered, raised = (np.zeros(extra.shape, dtype=np.int64) for _ in range(2))
        for part in range(parts):
            moved = cost[part, items][:, None] - cost[part, others]
            if parts == 1:
                allowed &= moved > 0
            left, taken = height[part][one] - moved, height[part][other] + moved
            rest = _highest_but(high[part], top[part], from_row, one % span)
            both = np.maximum(left, taken)
            if same.any():
                rest_of_both = _highest_but(high[part], top[part], from_row, one % span, other % span)
                both = np.maximum(both, rest_of_both)
            lowered += high[part][from_row, 0] - np.where(same, both, np.maximum(left, rest))
            beside = _highest_but(high[part], top[part], to_row, other % span)
            raised += np.maximum(taken, beside) - high[part][to_row, 0]
        raised[same] = 0
        work = shared[items][:, None] - shared[others]
        group = to_row // rows
        after = times[slow] - span * lowered + np.where(group == slow, span * raised, -work)
        after = np.where(group == slow, after, np.maximum(after, times[group] + span * raised + work))
        after[~allowed] = NEVER
        best = int(after.argmin())
        if after.flat[best] >= times[slow]:
            break
        item, partner = items[best // others.size], others[best % others.size]
        for at, sign in ((place[item], -1), (place[partner], 1)):
            height[:, at] += sign * (cost[:, item] - cost[:, partner])
            room[at] -= sign * (weight[item] - weight[partner])
            count[at] += sign * int(partner >= n)
        place[item], ghost = place[partner], place[item]
        if partner < n:
            place[partner] = ghost
    return place[:n]


def _partners(height: Ints, times: Ints, *, slow: int, span: int) -> NDArray[np.bool_]:
    """`[num_bins]` bins that samples are exchanged with: those of the groups, or the bins, with least work."""
    groups, bins = times.size, height.shape[1]
    near = np.ones((groups, bins // groups), dtype=np.bool_)
    if groups > PARTNERS:
        near[np.argsort(times, kind="stable")[PARTNERS:]] = False
        near[slow] = True
    elif bins == span > PARTNERS:
        near[0] = False
        near[0, np.argsort(height, axis=1, kind="stable")[:, :PARTNERS]] = True
    return near.reshape(-1)


def _highest_but(high: Ints, top: Ints, row: Ints, column: Ints, second: Ints | None = None) -> Ints:
    """Height of a row without one or two of its bins. `high`, `top`: `[rows, 3]` its highest bins, and which."""
    rest = np.zeros(np.broadcast_shapes(row.shape, column.shape), dtype=np.int64)
    for index in reversed(range(high.shape[1])):
        here = top[row, index]
        left_out = here == column
        if second is not None:
            left_out = left_out | (here == second)
        rest = np.where(left_out, rest, high[row, index])
    return rest
