"""Plans of samples whose rank is given: they may not move, groups stay on a rank, or Karmarkar-Karp gave them away.

All ranks place their costliest sample at once, each in the micro-batch furthest below its target that has room, then
their second, and so on. Where ranks meet in every micro-batch, the targets of the next round are the heights that slots
had in this one: what stands beside another rank's giant is free up to its height.

Largest differencing is that of N. Karmarkar and R. M. Karp, "The differencing method of set partitioning" (1982), in
the form for more than two parts, which keeps the sums of all parts of each partial solution:

    1. every item is a partial solution: one part holds it, the others are empty
    2. take the two partial solutions of widest difference (largest sum minus smallest)
    3. join them crosswise: the largest part of one with the smallest of the other, and so on
    4. repeat until one solution is left
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heapreplace
from itertools import count

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError
from megatron_balance.planner.batch import Batch, Plan, sums
from megatron_balance.planner.inputs import Ints
from megatron_balance.planner.pipeline import Pipeline
from megatron_balance.planner.pipeline_plan import improved, numbers_of_microbatches, profiles
from megatron_balance.planner.plan import CORRECTIONS, in_slots, no_empty, plan, row_counts, with_headroom
from megatron_balance.planner.times import Waiting

MAX_DIFFERENCED = 4096
"""Items up to which largest differencing, which is plain Python, is worth its time."""

NEAR_ENOUGH = 10_000
"""Parts that differencing brings within one part in so many of the mean are taken: a search takes 20 times as long."""

_APART = Waiting(1, in_slots=False, pipeline=Pipeline())

_Part = tuple[int, int, list[int]]
"""`(-sum of costs, number, items)`; the number, unique, breaks ties."""


def plan_on_ranks(batch: Batch, rank_of: Ints, *, rows: int | None = None) -> Plan:
    """Packs the samples of every rank by themselves, in `rows` micro-batches or in the number that is best."""
    order = np.lexsort((-batch.weights, -batch.own, rank_of))
    inner, ranks = with_headroom(batch.take(order)), rank_of[order]
    counts = np.bincount(ranks, minlength=batch.num_ranks)
    fullest = int(sums(inner.weights.clip(max=batch.cap), ranks, batch.num_ranks).max())
    fewest = -(-fullest // (batch.cap * batch.multiple)) * batch.multiple

    def bins(rows: int, slots: Ints) -> Ints:
        return ranks * rows + _no_empty(slots, ranks, counts, rows)

    microbatch_of = np.empty_like(order)
    if batch.waiting.is_makespan:
        starts: list[tuple[Ints, int]] = []
        for wanted in sorted({max(number, fewest) for number in numbers_of_microbatches(inner, rows)}):
            for profile in profiles(inner, wanted):
                num_rows, slots = next(_rounds(inner, ranks, profile))
                rank, slot = np.divmod(bins(num_rows, slots), num_rows)
                group, column = np.divmod(rank, batch.span)
                starts.append(((group * num_rows + slot) * batch.span + column, num_rows))
        microbatch_of[order], rows = improved(inner, [starts], bound=True)
        return Plan(microbatch_of, _alone(batch, rows))
    best: tuple[int, Ints, int] | None = None
    lost = reached = 0
    for wanted in (max(number, fewest) for number in (row_counts(inner) if rows is None else (rows,))):
        if lost == 2:
            break
        if wanted <= reached:
            continue
        lost += 1
        for num_rows, slots in _rounds(inner, ranks, np.ones(wanted, dtype=np.int64)):
            reached = max(reached, num_rows)
            placed = _ordered(inner, bins(num_rows, slots), num_rows)
            time = inner.time(placed, _alone(batch, num_rows))
            if best is None or time < best[0]:
                best, lost = (time, placed, num_rows), 0
    assert best is not None, "one number of rows is always tried"
    microbatch_of[order] = best[1]
    return Plan(microbatch_of, _alone(batch, best[2]))


def karmarkar_karp_plan(batch: Batch, *, equal_count: bool, rows: int | None = None) -> Plan:
    """Largest differencing of samples over ranks, then of each over `rows` micro-batches or the fewest possible.

    There are more where one would be over the cap, until an over-long sample is alone. With `equal_count` ranks and
    micro-batches get the same number of samples, or one less.
    """
    rank_of = _parts(karmarkar_karp(batch.own + batch.shared, num_parts=batch.num_ranks, equal_size=equal_count))
    ids = [np.flatnonzero(rank_of == rank) for rank in range(batch.num_ranks)]
    rows = next(iter(row_counts(batch))) if rows is None else rows
    while True:
        microbatch_of = np.zeros(batch.num_samples, dtype=np.int64)
        for rank, own in enumerate(ids):
            slots = _parts(karmarkar_karp(batch.own[own], num_parts=rows, equal_size=equal_count))
            microbatch_of[own] = rank * rows + slots
        held = sums(batch.weights, microbatch_of, batch.num_ranks * rows)
        if not ((held > batch.cap) & (np.bincount(microbatch_of, minlength=held.size) > 1)).any():
            break
        rows += batch.multiple * max(1, rows // (32 * batch.multiple))
    order = np.argsort(-batch.own, kind="stable")
    filled = np.empty_like(microbatch_of)
    filled[order] = no_empty(microbatch_of[order], batch.num_ranks * rows)
    return Plan(_ordered(batch, filled, rows), _alone(batch, rows))


def partition_items(costs: Ints, *, num_parts: int, equal_count: bool) -> Ints:
    """The part of each item, of nearly the same cost: by largest differencing, or as ranks with one micro-batch.

    With `equal_count` every part holds the same number of items, or at most one more where that does not divide. Parts
    of any number are at most costlier than those by one part in `NEAR_ENOUGH`.
    """
    ways: list[Ints] = []

    def most(part_of: Ints) -> int:
        return int(sums(costs, part_of, num_parts).max(initial=0))

    for equal in (True,) if equal_count else (False, True):
        if costs.size <= MAX_DIFFERENCED:
            differenced = _parts(karmarkar_karp(costs, num_parts=num_parts, equal_size=equal))
            if NEAR_ENOUGH * (most(differenced) * num_parts - int(costs.sum())) <= int(costs.sum()):
                return differenced
            ways.append(differenced)
        cap = max(-(-costs.size // num_parts) if equal else costs.size, 1)
        none, ones = np.zeros_like(costs), np.ones_like(costs)
        batch = Batch(costs[None], shared=none, weights=ones, cap=cap, num_ranks=num_parts, waiting=_APART)
        ways.append(plan(batch, rows=1).microbatch_of)
    # The first of equals: the same choice everywhere.
    return min(ways, key=most)


def karmarkar_karp(
    costs: Sequence[int] | NDArray[np.int64], *, num_parts: int, equal_size: bool = False
) -> list[list[int]]:
    """Splits items into parts of nearly equal cost by largest differencing: parts by falling cost, items ascending.

    With `equal_size` the numbers of items differ by one at most: step 1 starts from sorted items cut into rows, one
    item a part.
    """
    if num_parts < 1:
        raise BalanceError(f"num_parts is {num_parts}: it must be at least 1.")
    items: list[_Part] = sorted((-int(cost), item, [item]) for item, cost in enumerate(costs))
    width, numbers = num_parts if equal_size else 1, count(len(items))

    def ranked(parts: list[_Part]) -> tuple[int, int, list[_Part]]:
        """Widest difference first, then oldest. Empty parts are not listed."""
        smallest = parts[-1][0] if len(parts) == num_parts else 0
        return parts[0][0] - smallest, next(numbers), parts

    heap = [ranked(items[start : start + width]) for start in range(0, len(items), width)]
    heapify(heap)
    while len(heap) > 1:
        one, other = heappop(heap)[2], heap[0][2]
        # Of `one` the last, of `other` the last in reverse: the others meet empty parts.
        shared = max(len(one) + len(other) - num_parts, 0)
        apart, meeting = len(one) - shared, other[len(other) - shared :]
        joined = one[:apart] + other[: len(other) - shared]
        for (cost, _, held), (added, _, further) in zip(one[apart:], reversed(meeting), strict=True):
            longer, shorter = (held, further) if len(held) >= len(further) else (further, held)
            longer.extend(shorter)
            joined.append((cost + added, next(numbers), longer))
        heapreplace(heap, ranked(sorted(joined)))
    parts = sorted((cost, sorted(held)) for cost, _, held in heap[0][2]) if heap else []
    return [held for _, held in parts] + [[] for _ in range(num_parts - len(parts))]


def _rounds(batch: Batch, ranks: Ints, profile: Ints) -> Iterator[tuple[int, Ints]]:
    """Rows and the slot of every sample within its rank; where ranks meet, with targets that follow the last round.

    Samples come rank by rank, costliest first. `profile`: relative targets of slots. More rows where they find no room.
    """
    rows, even = profile.size, sums(batch.own, ranks, batch.num_ranks)
    targets = -(-even[:, None] // int(profile.sum())) * profile
    while (slots := _pour_by_rank(batch, ranks, targets)) is None:
        rows += batch.multiple
        targets = np.tile(-(-even[:, None] // rows), rows)
    yield rows, slots
    for _ in range(CORRECTIONS if batch.span > 1 else 0):
        heights = sums(batch.own, ranks * rows + slots, batch.num_ranks * rows).reshape(-1, rows)
        falling = -np.sort(-heights, axis=1)
        of_groups = falling.reshape(-1, batch.span, rows).max(axis=1).repeat(batch.span, axis=0)
        again = _pour_by_rank(batch, ranks, of_groups)
        if again is None or (again == slots).all():
            break
        slots = again
        yield rows, slots


def _pour_by_rank(batch: Batch, ranks: Ints, targets: Ints) -> Ints | None:
    """The slot of each sample within its rank; None where one finds no room. `targets`: `[num_ranks, rows]`."""
    slack, room = targets.copy(), np.full(targets.shape, batch.cap, dtype=np.int64)
    slots = np.full(ranks.size, -1, dtype=np.int64)
    over = batch.weights > batch.cap
    for ids in (np.flatnonzero(over), np.flatnonzero(~over)):
        weights = batch.weights[ids].clip(max=batch.cap)
        slots[ids] = pour_each(batch.own[ids], weights, group_of=ranks[ids], slack=slack, room=room)
        if over.any():
            alone = over & (slots >= 0)
            room[ranks[alone], slots[alone]] = -1
    return None if (slots < 0).any() else slots


def pour_each(costs: Ints, weights: Ints, *, group_of: Ints, slack: Ints, room: Ints) -> Ints:
    """Gives each item of every group to the group's bin with most slack that has room, all groups at once.

    Items come group by group, in the order in which they are placed. `slack` and `room`, `[num_groups, num_bins]`, are
    overwritten. Returns the bin within the group, -1 where an item finds no room.
    """
    bins = np.full(costs.size, -1, dtype=np.int64)
    position = np.arange(costs.size) - group_of.searchsorted(group_of)
    ends = np.cumsum(np.bincount(position)).tolist()
    by_position = np.argsort(position, kind="stable")
    for start, end in zip([0, *ends], ends, strict=False):
        items = by_position[start:end]
        group = group_of[items]
        fits = room[group] >= weights[items, None]
        found = fits.any(axis=1)
        items, group, fits = items[found], group[found], fits[found]
        best = np.where(fits, slack[group], np.iinfo(np.int64).min).argmax(axis=1)
        slack[group, best] -= costs[items]
        room[group, best] -= weights[items]
        bins[items] = best
    return bins


def _no_empty(slots: Ints, ranks: Ints, counts: Ints, rows: int) -> Ints:
    """A rank's cheapest samples with company move to its empty slots. Samples come rank by rank, costliest first."""
    slots, ends = slots.copy(), np.cumsum(counts)
    held = np.bincount(ranks * rows + slots, minlength=counts.size * rows).reshape(-1, rows)
    for rank in np.flatnonzero((held == 0).any(axis=1) & (counts > 0)).tolist():
        here = slice(ends[rank] - counts[rank], ends[rank])
        slots[here] = no_empty(slots[here], rows)
    return slots


def _ordered(batch: Batch, microbatch_of: Ints, rows: int) -> Ints:
    """Slots of each rank by falling cost, so that ranks have equal ones; in a pipeline as a mountain."""
    apart = replace(batch, expert_span=1, waiting=replace(batch.waiting, span=1))
    return in_slots(apart, microbatch_of, rows)


def _alone(batch: Batch, rows: int) -> Ints:
    """`Plan.cp_sizes` at one size."""
    return np.ones((batch.num_ranks, rows), dtype=np.int64)


def _parts(parts: list[list[int]]) -> Ints:
    """`[num_items]` part of each item."""
    part_of = np.zeros(sum(map(len, parts)), dtype=np.int64)
    for part, items in enumerate(parts):
        part_of[items] = part
    return part_of
