"""Packs samples that may not leave their ranks.

All ranks place their costliest sample at once, each in the micro-batch furthest below its target that has room, then
their second, and so on. Where ranks meet in every micro-batch, the targets of the next round are the loads that slots
had in this one: samples in the slot of another rank's dominant sample are free up to its cost.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megatron_balance.planner.level_packing import CORRECTIONS, Batch, Plan, order_apart, slot_numbers
from megatron_balance.planner.list_scheduling import assign_in_groups, fill_empty_bins
from megatron_balance.planner.pipeline_packing import profiles, search_makespan
from megatron_balance.planner.pipeline_packing import slot_numbers as pipeline_numbers
from megatron_balance.planner.problem import Ints, sums


def plan_on_ranks(batch: Batch, rank_of: Ints, *, num_slots: int | None = None) -> Plan:
    """Packs the samples of every rank by themselves, in `num_slots` micro-batches or in the number that is best."""
    order = np.lexsort((-batch.weights, -batch.local_cost, rank_of))
    batch, ranks = batch.take(order), rank_of[order]
    counts = np.bincount(ranks, minlength=batch.num_ranks)
    largest = int(sums(batch.weights.clip(max=batch.cap), ranks, batch.num_ranks).max())
    fewest = -(-largest // (batch.cap * batch.multiple)) * batch.multiple

    def filled(slots: Ints, number: int) -> Ints:
        parts = [fill_empty_bins(part, number) for part in np.split(slots, np.cumsum(counts)[:-1])]
        return ranks * number + np.concatenate(parts)

    microbatch_of = np.empty_like(order)
    if batch.waiting.is_makespan:
        starts: list[tuple[Ints, int]] = []
        for start in sorted({max(number, fewest) for number in pipeline_numbers(batch, num_slots)}):
            for profile in profiles(batch, start):
                number, slots = next(_rounds(batch, ranks, profile))
                rank, slot = np.divmod(filled(slots, number), number)
                group, column = np.divmod(rank, batch.sync_size)
                starts.append(((group * number + slot) * batch.sync_size + column, number))
        microbatch_of[order], number = search_makespan(batch, starts, fixed_ranks=True)
        return Plan(microbatch_of, np.ones((batch.num_ranks, number), dtype=np.int64))
    best: tuple[int, Ints, Ints] | None = None
    tries_without_gain = max_tried = 0
    for start in (max(number, fewest) for number in (slot_numbers(batch) if num_slots is None else (num_slots,))):
        if tries_without_gain == 2:
            break
        if start <= max_tried:
            continue
        tries_without_gain += 1
        for number, slots in _rounds(batch, ranks, np.ones(start, dtype=np.int64)):
            max_tried, sizes = max(max_tried, number), np.ones((batch.num_ranks, number), dtype=np.int64)
            bins = order_apart(batch, filled(slots, number), number)
            time = batch.time(bins, sizes)
            if best is None or time < best[0]:
                best, tries_without_gain = (time, bins, sizes), 0
    assert best is not None, "one number of slots is always tried"
    microbatch_of[order] = best[1]
    return Plan(microbatch_of, best[2])


def _rounds(batch: Batch, ranks: Ints, profile: Ints) -> Iterator[tuple[int, Ints]]:
    """Numbers of slots, and the slot of each sample in its rank: by a profile of targets, then by corrected targets."""
    num_slots, costs = profile.size, sums(batch.local_cost, ranks, batch.num_ranks)
    targets = -(-costs[:, None] // int(profile.sum())) * profile
    while (slots := _assign_on_ranks(batch, ranks, targets)) is None:
        num_slots += batch.multiple
        targets = np.tile(-(-costs[:, None] // num_slots), num_slots)
    yield num_slots, slots
    for _ in range(CORRECTIONS if batch.sync_size > 1 else 0):
        loads = sums(batch.local_cost, ranks * num_slots + slots, batch.num_ranks * num_slots).reshape(-1, num_slots)
        descending = -np.sort(-loads, axis=1)
        targets = descending.reshape(-1, batch.sync_size, num_slots).max(axis=1).repeat(batch.sync_size, axis=0)
        corrected = _assign_on_ranks(batch, ranks, targets)
        if corrected is None or (corrected == slots).all():
            break
        slots = corrected
        yield num_slots, slots


def _assign_on_ranks(batch: Batch, ranks: Ints, targets: Ints) -> Ints | None:
    """The slot of each sample within its rank; None where one finds no room. `targets`: `[num_ranks, num_slots]`."""
    slack, room = targets.copy(), np.full(targets.shape, batch.cap, dtype=np.int64)
    slots = np.full(ranks.size, -1, dtype=np.int64)
    over = batch.weights > batch.cap
    for ids in (np.flatnonzero(over), np.flatnonzero(~over)):
        weights = batch.weights[ids].clip(max=batch.cap)
        slots[ids] = assign_in_groups(batch.local_cost[ids], weights, group_of=ranks[ids], slack=slack, room=room)
        if over.any():
            single = over & (slots >= 0)
            room[ranks[single], slots[single]] = -1
    return None if (slots < 0).any() else slots
