"""Plans that mind where samples were loaded: on fixed ranks, or relabelled so that fewer tokens move.

Where samples may not move, or groups stay on a rank, all ranks place their costliest sample at once, each in the
micro-batch furthest below its target that has room, then their second, and so on. Where ranks meet in every
micro-batch, the targets of the next round are the loads that slots had in this one: samples in the slot of another
rank's dominant sample are free up to its cost.

Else the cost depends on which samples run together and not on where. Interchangeable are whole ranks where ranks meet
once a step; where they meet in every micro-batch, groups of ranks that meet, and in each slot the micro-batches of a
group. Where an expert-parallel group shares work, only its own ranks, and whole groups, are. Each choice takes the pair
that keeps most tokens on their home rank, until none is free. A block is what moves as a whole, a target where it goes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megatron_balance.planner.level_packing import CORRECTIONS, Batch, Plan, order_apart, slot_numbers
from megatron_balance.planner.list_scheduling import assign_in_groups, fill_empty_bins
from megatron_balance.planner.pipeline_packing import profiles, search_makespan
from megatron_balance.planner.pipeline_packing import slot_numbers as pipeline_numbers
from megatron_balance.planner.problem import Ints, Problem, sums


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


def keep_local(
    batch: Batch, microbatch_of: Ints, *, num_microbatches: int, problem: Problem, whole_ranks: bool = False
) -> Ints:
    """Exchanges equal ranks and micro-batches so that fewer tokens move, at the same cost.

    With `whole_ranks` samples of one rank stay on one rank.
    """
    homes, lengths = problem.home_ranks, problem.lengths
    assert homes is not None
    # Ranks that meet in every micro-batch wait for the costliest of a slot, whichever of them runs it.
    per_slot = batch.sync_size > 1 and not whole_ranks
    sync_size = batch.sync_size if batch.sync_size > 1 else batch.num_ranks
    if batch.expert_cost.any():
        sync_size = batch.ep_dp_size
    num_groups, num_slots = batch.num_ranks // sync_size, num_microbatches if per_slot else 1
    rank, slot = np.divmod(microbatch_of, num_microbatches)
    group, column = np.divmod(rank, sync_size)
    groups = _match_greedily(group, homes // sync_size, lengths, size=num_groups)
    # Inside a group that has its target, blocks are its ranks, or the micro-batches of each slot.
    block = (group * num_slots + (slot if per_slot else 0)) * sync_size + column
    is_inside = homes // sync_size == groups[group]
    inner = _match_greedily(
        block[is_inside],
        (block // sync_size * sync_size + homes % sync_size)[is_inside],
        lengths[is_inside],
        size=num_groups * num_slots * sync_size,
    )
    permuted = (groups[group] * sync_size + inner[block] % sync_size) * num_microbatches + slot
    return min((microbatch_of, permuted), key=lambda slots: problem.moved_tokens(slots // num_microbatches))


def _match_greedily(block: Ints, target: Ints, tokens: Ints, *, size: int) -> Ints:
    """Gives each of `size` blocks a different target, the pair that keeps most tokens first, in many problems at once.

    `block`, `target`: of each sample. A round chooses every pair that keeps most of its block and of its target.
    """
    keys, key_of = np.unique(block * size + target, return_inverse=True)
    order = np.argsort(-sums(tokens, key_of.reshape(-1), keys.size), kind="stable")
    blocks, targets = np.divmod(keys[order], size)
    target_of, used = np.full(size, -1, dtype=np.int64), np.zeros(size, dtype=np.bool_)
    while blocks.size:
        position = np.arange(blocks.size)
        first_by_block, first_by_target = np.zeros((2, size), dtype=np.int64)
        # Assigned backwards, so that the first entry stays.
        first_by_block[blocks[::-1]] = position[::-1]
        first_by_target[targets[::-1]] = position[::-1]
        chosen = (first_by_block[blocks] == position) & (first_by_target[targets] == position)
        target_of[blocks[chosen]] = targets[chosen]
        used[targets[chosen]] = True
        remaining = (target_of[blocks] < 0) & ~used[targets]
        blocks, targets = blocks[remaining], targets[remaining]
    target_of[target_of < 0] = np.flatnonzero(~used)
    return target_of
