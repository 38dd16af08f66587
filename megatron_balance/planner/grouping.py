"""Groups of samples that must run on one rank: siblings of a prompt, a reward pair, turns of a rollout.

A group is one item of number partitioning, as heavy as its samples together. Two ways are tried, largest
differencing and largest first; the better one is refined by moves and swaps of whole groups. Samples are
packed inside the ranks afterwards, as for samples that may not leave their rank.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_balance.planner.partition import greedy, karmarkar_karp, refine
from megatron_balance.planner.problem import Problem

KEEP_GROUPS = ("rank", "step")
"""`rank`: a group runs on one rank. `step`: it runs in one optimiser step, which one global batch is anyway."""

MAX_DIFFERENCED_GROUPS = 4096
"""Largest differencing handles `num_groups * dp_size` parts in plain Python; largest first is enough beyond."""

MAX_REFINED_GROUPS = 1024
"""Refining looks at pairs of groups."""


def assign_groups(problem: Problem, *, groups: NDArray[np.int64]) -> NDArray[np.int64]:
    """Gives whole groups to ranks so that ranks cost the same.

    Where micro-batches hold a number of samples, every rank gets the same number of groups, or one less.

    Args:
        problem: the global batch.
        groups: `[num_samples]` group of each sample, numbered from 0 without gaps.

    Returns:
        `[num_samples]` int64 rank of each sample.
    """
    dp_size = problem.topology.dp_size
    if not groups.size:
        return groups
    costs = np.zeros(int(groups.max()) + 1, dtype=np.int64)
    np.add.at(costs, groups, problem.costs + problem.shared_costs)
    return partition_items(costs, num_parts=dp_size, equal_count=problem.counts_samples)[groups]


def partition_items(costs: NDArray[np.int64], *, num_parts: int, equal_count: bool) -> NDArray[np.int64]:
    """Cuts items into parts of nearly the same cost: greedy or largest differencing, then refined.

    Args:
        costs: `[num_items]` int64, non-negative, whose sum stays in int64.
        num_parts: parts to make.
        equal_count: every part holds the same number of items; where that does not divide, at most one more.

    Returns:
        `[num_items]` int64 part of each item.
    """
    even_count = -(-costs.size // num_parts)

    ways = [greedy(costs, num_parts=num_parts, max_count=even_count if equal_count else None)]
    if costs.size <= MAX_DIFFERENCED_GROUPS:
        ways.append(karmarkar_karp(costs, num_parts=num_parts, equal_size=equal_count))
    # The first of equals: the same choice everywhere.
    parts = min(ways, key=lambda parts: max(int(costs[items].sum()) for items in parts))

    part_of = np.empty(costs.size, dtype=np.int64)
    for part, items in enumerate(parts):
        part_of[items] = part
    if costs.size <= MAX_REFINED_GROUPS:
        part_of = refine(
            costs,
            weights=np.ones_like(costs),
            capacity=even_count if equal_count else costs.size,
            bin_of=part_of,
            num_groups=num_parts,
            bins_per_group=1,
            target=-(-int(costs.sum()) // num_parts),
        )
    return part_of


def groups_that_split(groups: NDArray[np.int64], *, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Groups with samples on more than one rank.

    Args:
        groups: `[num_samples]` group of each sample, from 0.
        ranks: `[num_samples]` rank of each sample.

    Returns:
        `[num_split]` ascending.
    """
    if not groups.size:
        return groups
    rank_of = np.zeros(int(groups.max()) + 1, dtype=np.int64)
    rank_of[groups] = ranks
    return np.unique(groups[rank_of[groups] != ranks])
