"""Relabels the ranks and slots of a plan so that fewer tokens move, at unchanged cost.

Ranks are equal, so the cost depends on which samples run together and not on where. Interchangeable are:

    where ranks meet once a step          whole ranks
    where they meet in every micro-batch  groups of ranks that meet, and in each slot the micro-batches of a group
    everywhere                            samples of the same cost and the same weight, wherever they are

Where an expert-parallel group shares work, only its own ranks, and whole groups, are interchangeable. Each choice takes
the pair that keeps most tokens on their home rank, then most on the node of that rank, until none is free.
A block is what moves as a whole, a target where it goes.
"""

from __future__ import annotations

import numpy as np

from megatron_balance.planner.level_packing import Batch
from megatron_balance.planner.problem import Ints, Problem, sums

_MAX_NEAR = 2**20
"""Most pairs of a block and a target on the node of its samples' home; larger problems are solved without nodes."""

_Benefits = tuple[Ints, Ints, Ints]
"""Blocks, ascending, their targets, and what each pair keeps."""


def keep_local(
    batch: Batch, microbatch_of: Ints, *, num_microbatches: int, problem: Problem, whole_ranks: bool = False
) -> Ints:
    """Exchanges equal ranks, micro-batches and samples so that fewer tokens move, at the same cost.

    With `whole_ranks` samples of one rank stay on one rank.
    """
    if batch.num_ranks == 1 or not microbatch_of.size:
        return microbatch_of

    def num_moved(slots: Ints) -> list[int]:
        return [
            problem.moved_tokens(slots // num_microbatches, width=width)
            for width in (1, problem.ranks_per_node)
            if width
        ]

    # Each step counts where it moves fewer tokens, or as many and fewer between nodes: the first of equals.
    best = min(
        (microbatch_of, _permute(batch, microbatch_of, num_microbatches, problem, whole_ranks=whole_ranks)),
        key=num_moved,
    )
    return best if whole_ranks else min((best, _exchange_equal(batch, best, num_microbatches, problem)), key=num_moved)


def _permute(batch: Batch, microbatch_of: Ints, num_microbatches: int, problem: Problem, *, whole_ranks: bool) -> Ints:
    """Permutes groups of ranks, and inside them ranks or the micro-batches of a slot."""
    # Ranks that meet in every micro-batch wait for the costliest of a slot, whichever of them runs it.
    per_slot = batch.sync_size > 1 and not whole_ranks
    sync_size = batch.sync_size if batch.sync_size > 1 else batch.num_ranks
    if batch.expert_cost.any():
        sync_size = batch.ep_dp_size
    num_groups, num_slots = batch.num_ranks // sync_size, num_microbatches if per_slot else 1
    rank, slot = np.divmod(microbatch_of, num_microbatches)
    group, column = np.divmod(rank, sync_size)
    groups = _match_greedily(*_benefits(group, problem, width=sync_size, num_targets=num_groups), size=num_groups)
    # Inside a group that has its target, blocks are its ranks, or the micro-batches of each slot.
    blocks = (group * num_slots + (slot if per_slot else 0)) * sync_size + column
    block, target, benefit = _benefits(blocks, problem, width=1, num_targets=batch.num_ranks)
    is_inside = target // sync_size == groups[block // (sync_size * num_slots)]
    block, target, benefit = block[is_inside], target[is_inside], benefit[is_inside]
    size = num_groups * num_slots * sync_size
    targets = _match_greedily(block, block // sync_size * sync_size + target % sync_size, benefit, size=size)
    return (groups[group] * sync_size + targets[blocks] % sync_size) * num_microbatches + slot


def _benefits(block: Ints, problem: Problem, *, width: int, num_targets: int) -> _Benefits:
    """Tokens that each block keeps at each target, which is `width` ranks; of `block` each sample's.

    A token at home counts more than all tokens on their node, as far as int64 allows.
    """
    homes, per_node = problem.home_ranks, problem.ranks_per_node
    assert homes is not None
    if per_node is None or per_node <= width:
        return _summed(block, homes // width, problem.lengths)
    node_block, first, tokens = _summed(block, homes // per_node * per_node // width, problem.lengths)
    targets = first[:, None] + np.arange(per_node // width)
    if targets.size > _MAX_NEAR:
        return _summed(block, homes // width, problem.lengths)
    total = int(problem.lengths.sum()) + 1
    blocks = np.concatenate([block, node_block.repeat(targets.shape[1])])
    benefits = np.concatenate([problem.lengths * min(total, 2**61 // total), tokens.repeat(targets.shape[1])])
    return _summed(blocks, np.concatenate([homes // width, targets.reshape(-1).clip(max=num_targets - 1)]), benefits)


def _summed(block: Ints, target: Ints, benefits: Ints) -> _Benefits:
    """The sum of benefits of each pair that occurs."""
    num_targets = int(target.max(initial=0)) + 1
    keys, key_of = np.unique(block * num_targets + target, return_inverse=True)
    return keys // num_targets, keys % num_targets, sums(benefits, key_of.reshape(-1), keys.size)


def _match_greedily(blocks: Ints, targets: Ints, benefits: Ints, *, size: int) -> Ints:
    """Gives each of `size` blocks a different target, the largest benefit first, in many problems at once.

    A round chooses every pair whose benefit is the largest of its block and of its target.
    """
    target_of, used = np.full(size, -1, dtype=np.int64), np.zeros(size, dtype=np.bool_)
    order = np.argsort(-benefits, kind="stable")
    blocks, targets = blocks[order], targets[order]
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


def _exchange_equal(batch: Batch, microbatch_of: Ints, num_microbatches: int, problem: Problem) -> Ints:
    """Exchanges samples of equal cost and weight, long ones first: to their home rank, then to its node."""
    assert problem.home_ranks is not None
    columns = np.vstack([batch.costs, batch.expert_cost[None], batch.weights[None]])
    order = np.lexsort(columns)
    differs = (np.diff(columns[:, order], axis=1) != 0).any(axis=0)
    kind_of = np.empty_like(order)
    kind_of[order] = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(differs)])
    positions = np.flatnonzero(np.bincount(kind_of)[kind_of] > 1)
    samples = positions[np.argsort(-problem.lengths[positions], kind="stable")]
    old, microbatch_of = microbatch_of, microbatch_of.copy()
    for width in (1, problem.ranks_per_node):
        if width is None:
            break
        num_targets = -(-batch.num_ranks // width)
        requested = kind_of[samples] * num_targets + problem.home_ranks[samples] // width
        offered = kind_of[positions] * num_targets + old[positions] // num_microbatches // width
        wanted_index, offered_index = _pair_equal(requested, offered)
        microbatch_of[samples[wanted_index]] = old[positions[offered_index]]
        samples, positions = np.delete(samples, wanted_index), np.delete(positions, offered_index)
    # Of each kind there are as many positions as samples.
    samples, positions = (ids[np.argsort(kind_of[ids], kind="stable")] for ids in (samples, positions))
    microbatch_of[samples] = old[positions]
    return microbatch_of


def _pair_equal(requested: Ints, offered: Ints) -> tuple[Ints, Ints]:
    """Pairs entries of equal value, first with first: their indices in both, `[num_pairs]` each."""
    orders = [np.argsort(values, kind="stable") for values in (requested, offered)]
    keys: list[Ints] = []
    for values, order in zip((requested, offered), orders, strict=True):
        ascending = values[order]
        keys.append(ascending * (values.size + 1) + np.arange(values.size) - ascending.searchsorted(ascending))
    # Both ascend, without equal entries.
    targets = keys[1].searchsorted(keys[0])
    paired = np.append(keys[1], -1)[targets] == keys[0]
    return orders[0][paired], orders[1][targets[paired]]
