"""Plans of samples whose rank is given: they may not move, groups stay on a rank, or Karmarkar-Karp gave them away.

All ranks place their costliest sample at once, each in the micro-batch furthest below its target that has room, then
their second, and so on. Where ranks meet in every micro-batch, the targets of the next round are the heights that slots
had in this one: what stands beside another rank's giant is free up to its height.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from megatron_balance.planner.batch import Batch, sums
from megatron_balance.planner.inputs import Ints
from megatron_balance.planner.karmarkar_karp import karmarkar_karp
from megatron_balance.planner.plan import CORRECTIONS, SLOPES, Plan, in_slots, no_empty, plan, row_counts
from megatron_balance.planner.times import Waiting

MAX_DIFFERENCED = 4096
"""Items up to which largest differencing, which is plain Python, is worth its time."""

MAX_ATTEMPTS = 8
"""Numbers of micro-batches to try with largest differencing, which knows no cap, before samples are poured."""

_APART = Waiting(1, in_slots=False, pp_size=1, vpp_size=1)


def plan_on_ranks(batch: Batch, rank_of: Ints) -> Plan:
    """Packs the samples of every rank by themselves, with the same number of micro-batches."""
    order = np.lexsort((-batch.weights, -batch.own, rank_of))
    inner, ranks = batch.take(order), rank_of[order]
    counts = np.bincount(ranks, minlength=batch.num_ranks)
    fullest = int(sums(inner.weights.clip(max=batch.cap), ranks, batch.num_ranks).max())
    fewest = -(-fullest // (batch.cap * batch.multiple)) * batch.multiple
    best: tuple[int, Ints, int] | None = None
    lost = reached = 0
    for count in (max(count, fewest) for count in row_counts(inner)):
        if lost == 2:
            break
        if count <= reached:
            continue
        lost += 1
        for slope in SLOPES if batch.waiting.pp_size > 1 and batch.span == 1 else (0,):
            for rows, slots in _rounds(inner, ranks, count, slope=slope):
                reached = max(reached, rows)
                slot_of = _ordered(inner, ranks * rows + _no_empty(slots, ranks, counts, rows), rows)
                time = inner.time(slot_of, np.ones((batch.num_ranks, rows), dtype=np.int64))
                if best is None or time < best[0]:
                    best, lost = (time, slot_of, rows), 0
    assert best is not None, "one number of rows is always tried"
    slot_of = np.empty_like(order)
    slot_of[order] = best[1]
    return Plan(slot_of, best[2])


def karmarkar_karp_plan(batch: Batch, *, equal_count: bool) -> Plan:
    """Largest differencing of samples over ranks, then over the micro-batches of every rank, under the cap.

    With `equal_count` ranks and micro-batches get the same number of samples, or one less.
    """
    rank_of = _parts(karmarkar_karp(batch.own + batch.shared, num_parts=batch.num_ranks, equal_size=equal_count))
    ids = [np.flatnonzero(rank_of == rank) for rank in range(batch.num_ranks)]
    rows = next(iter(row_counts(batch)))
    for _ in range(MAX_ATTEMPTS):
        slot_of = np.zeros(batch.num_samples, dtype=np.int64)
        for rank, own in enumerate(ids):
            slots = _parts(karmarkar_karp(batch.own[own], num_parts=rows, equal_size=equal_count))
            slot_of[own] = rank * rows + slots
        held = sums(batch.weights, slot_of, batch.num_ranks * rows)
        if not ((held > batch.cap) & (np.bincount(slot_of, minlength=held.size) > 1)).any():
            break
        rows += batch.multiple
    else:
        packed = plan_on_ranks(batch, rank_of)
        slot_of, rows = packed.slot_of, packed.num_microbatches
    order = np.argsort(-batch.own, kind="stable")
    filled = np.empty_like(slot_of)
    filled[order] = no_empty(slot_of[order], batch.num_ranks * rows)
    return Plan(_ordered(batch, filled, rows), rows)


def partition_items(costs: Ints, *, num_parts: int, equal_count: bool) -> Ints:
    """Cuts items into parts of nearly the same cost: as ranks with one micro-batch, or by largest differencing.

    Args:
        costs: `[num_items]` int64, non-negative, with a sum that stays in int64.
        num_parts: parts to make.
        equal_count: every part holds the same number of items; where that does not divide, at most one more.

    Returns:
        `[num_items]` int64 part of each item.
    """
    cap = -(-costs.size // num_parts) if equal_count else costs.size
    none, ones = np.zeros_like(costs), np.ones_like(costs)
    batch = Batch(costs[None], shared=none, weights=ones, cap=max(cap, 1), num_ranks=num_parts, waiting=_APART)
    ways = [plan(batch, rows=1).slot_of]
    if costs.size <= MAX_DIFFERENCED:
        ways.append(_parts(karmarkar_karp(costs, num_parts=num_parts, equal_size=equal_count)))
    # The first of equals: the same choice everywhere.
    return min(ways, key=lambda part_of: int(sums(costs, part_of, num_parts).max(initial=0)))


def _rounds(batch: Batch, ranks: Ints, rows: int, *, slope: int) -> Iterator[tuple[int, Ints]]:
    """Rows and the slot of every sample within its rank; where ranks meet, with targets that follow the last round.

    Samples come rank by rank, costliest first. More rows where they find no room.
    """
    profile = 2 * rows + slope * (2 * rows - 1 - 2 * np.arange(rows))
    even = sums(batch.own, ranks, batch.num_ranks)
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


def _ordered(batch: Batch, slot_of: Ints, rows: int) -> Ints:
    """Slots of each rank by falling cost, so that ranks have equal ones; in a pipeline as a mountain."""
    apart = replace(batch, expert_span=1, waiting=replace(batch.waiting, span=1))
    return in_slots(apart, slot_of, rows)


def _parts(parts: list[list[int]]) -> Ints:
    """`[num_items]` part of each item."""
    part_of = np.zeros(sum(map(len, parts)), dtype=np.int64)
    for part, items in enumerate(parts):
        part_of[items] = part
    return part_of
