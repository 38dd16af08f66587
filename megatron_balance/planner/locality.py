"""Relabels the ranks and slots of a plan so that fewer tokens move, at unchanged cost.

Ranks are equal, so the cost depends on which samples run together and not on where. Interchangeable are whole ranks
where ranks meet once a step; where they meet in every micro-batch, groups of ranks that meet, and in each slot the
micro-batches of a group. Where an expert-parallel group shares work, only its own ranks, and whole groups, are. Each
choice takes the pair that keeps most tokens on their home rank, until none is free.
A block is what moves as a whole, a target where it goes.
"""

from __future__ import annotations

import numpy as np

from megatron_balance.planner.level_packing import Batch
from megatron_balance.planner.problem import Ints, Problem, sums


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
