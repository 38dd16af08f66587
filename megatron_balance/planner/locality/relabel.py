"""Relabels the ranks and slots of a plan so that fewer tokens move, at unchanged cost.

Ranks are equal, so the cost depends on which samples run together and not on where. Interchangeable are:

    where ranks meet once a step          whole ranks
    where they meet in every micro-batch  groups of ranks that meet, and in each slot the micro-batches of a group
    everywhere                            samples of the same cost and the same weight, wherever they are

Where an expert-parallel group shares work, only its own ranks, and whole groups, are interchangeable. Each
choice keeps the most tokens on their home rank, then the most within the node of that rank. The values of
the cost grid are only permuted, so the predicted cost is exactly the same.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_balance.planner.locality.assignment import MAX_BENEFIT, assign, assign_greedily
from megatron_balance.planner.problem import Problem
from megatron_balance.planner.sorting import run_starts, stable_order, sum_by_key

MAX_TABLE = 2**19
"""Most entries of a table of parts times ranks; larger problems are solved greedily by samples, without nodes."""

MAX_PAIR_WORK = 2**19
"""Most subsets for exact assignment within all pairs of groups and places; beyond, pairs are estimated."""


@dataclass(frozen=True, eq=False)
class Homes:
    """The home ranks of samples, and their tokens.

    Attributes:
        ranks: `[num_samples]` int64 rank that loaded each sample.
        tokens: `[num_samples]` int64 original tokens.
        ranks_per_node: data-parallel ranks of one node; None if nodes do not matter.
    """

    ranks: NDArray[np.int64]
    _: KW_ONLY
    tokens: NDArray[np.int64]
    ranks_per_node: int | None

    def moved_tokens(self, ranks: NDArray[np.int64]) -> int:
        """Tokens off their home rank, for `[num_samples]` ranks that run them."""
        return int(self.tokens[ranks != self.ranks].sum())

    def moved_off_node_tokens(self, ranks: NDArray[np.int64]) -> int:
        """Tokens off the node of their home rank; 0 if nodes do not matter."""
        if self.ranks_per_node is None:
            return 0
        return int(self.tokens[ranks // self.ranks_per_node != self.ranks // self.ranks_per_node].sum())

    def better(self, slot_of: NDArray[np.int64], other: NDArray[np.int64], *, num_microbatches: int) -> bool:
        """True if `slot_of` moves fewer tokens than `other`, or as many and fewer between nodes."""
        one, two = slot_of // num_microbatches, other // num_microbatches
        return (self.moved_tokens(one), self.moved_off_node_tokens(one)) < (
            self.moved_tokens(two),
            self.moved_off_node_tokens(two),
        )


def keep_local(
    problem: Problem, slot_of: NDArray[np.int64], *, num_microbatches: int, homes: Homes, whole_ranks: bool = False
) -> NDArray[np.int64]:
    """Exchanges equal ranks, micro-batches and samples so that fewer tokens move.

    Args:
        problem: the global batch.
        slot_of: `[num_samples]` `rank * num_microbatches + slot` of each sample.
        num_microbatches: slots of every rank.
        homes: where samples were loaded.
        whole_ranks: samples of one rank must stay on one rank.

    Returns:
        `[num_samples]` in the form of `slot_of`, with the same cost.
    """
    if problem.topology.dp_size == 1 or not slot_of.size:
        return slot_of
    found = _permute(problem, slot_of, num_microbatches=num_microbatches, homes=homes, whole_ranks=whole_ranks)
    best = found if homes.better(found, slot_of, num_microbatches=num_microbatches) else slot_of
    if whole_ranks:
        return best
    found = _exchange_equal(problem, best, num_microbatches=num_microbatches, homes=homes)
    return found if homes.better(found, best, num_microbatches=num_microbatches) else best


def _permute(
    problem: Problem, slot_of: NDArray[np.int64], *, num_microbatches: int, homes: Homes, whole_ranks: bool
) -> NDArray[np.int64]:
    """Permutes groups of ranks, and inside them ranks or the micro-batches of a slot."""
    dp_size = problem.topology.dp_size
    # Ranks that meet in every micro-batch wait for the costliest of a slot, whichever of them runs it.
    meet = problem.sync_group_size > 1
    per_slot = meet and not whole_ranks
    span = problem.sync_group_size if meet else dp_size
    if problem.shared_costs.any():
        span = problem.topology.ep_span
    # Parts are micro-batches where slots are permuted by themselves, else ranks.
    num_slots = num_microbatches if per_slot else 1
    part_of = slot_of if per_slot else slot_of // num_microbatches
    if dp_size * num_slots * dp_size <= MAX_TABLE:
        table = _benefits(part_of, num_parts=dp_size * num_slots, dp_size=dp_size, homes=homes)
        ranks = _permute_by_table(table.reshape(dp_size, num_slots, dp_size), span=span)
    else:
        ranks = _permute_by_samples(part_of, num_slots=num_slots, dp_size=dp_size, span=span, homes=homes)
    return ranks[part_of] * num_microbatches + slot_of % num_microbatches


def _benefits(part_of: NDArray[np.int64], *, num_parts: int, dp_size: int, homes: Homes) -> NDArray[np.int64]:
    """`[num_parts, dp_size]`: a token at home counts more than all tokens on their node."""
    total = int(homes.tokens.sum()) + 1
    weight = 1 if homes.ranks_per_node is None else total
    # Batches of more than 2**26 tokens lose their last bits here.
    shift = 0
    while (total >> shift) * ((weight >> shift) + 1) >= MAX_BENEFIT:
        shift += 1
    tokens, weight = homes.tokens >> shift, max(weight >> shift, 1)
    table = np.zeros((num_parts, dp_size), dtype=np.int64)
    np.add.at(table, (part_of, homes.ranks), tokens * weight)
    if homes.ranks_per_node is not None:
        nodes = np.arange(dp_size) // homes.ranks_per_node
        on_node = np.zeros((num_parts, int(nodes[-1]) + 1), dtype=np.int64)
        np.add.at(on_node, (part_of, homes.ranks // homes.ranks_per_node), tokens)
        table += on_node[:, nodes]
    return table


def _permute_by_table(table: NDArray[np.int64], *, span: int) -> NDArray[np.int64]:
    """New rank of every part, `[dp_size * num_slots]`, for benefits `[dp_size, num_slots, dp_size]`."""
    dp_size, num_slots, _ = table.shape
    num_groups = dp_size // span
    # [group, group's place, slot, part, part's place]
    pairs = table.reshape(num_groups, span, num_slots, num_groups, span).transpose(0, 3, 2, 1, 4)
    numbers = np.arange(num_groups, dtype=np.int64)
    work = num_groups**2 * num_slots * span * 2 ** min(span, 30)
    if num_groups == 1 or work <= MAX_PAIR_WORK:
        places = assign(pairs.reshape(-1, span, span)).reshape(num_groups, num_groups, num_slots, span)
        kept = np.take_along_axis(pairs, places[..., None], axis=4).sum(axis=(2, 3, 4))
        groups = assign(kept[None])[0]
        places = places[numbers, groups]
    else:
        groups = assign(pairs.sum(axis=(2, 3, 4))[None])[0]
        places = assign(pairs[numbers, groups].reshape(-1, span, span)).reshape(num_groups, num_slots, span)
    return (groups[:, None, None] * span + places.transpose(0, 2, 1)).reshape(-1)


def _permute_by_samples(
    part_of: NDArray[np.int64], *, num_slots: int, dp_size: int, span: int, homes: Homes
) -> NDArray[np.int64]:
    """Greedy variant of `_permute_by_table` without nodes, in time linear in samples and parts."""
    num_groups = dp_size // span
    group, slot, part = part_of // (num_slots * span), part_of % num_slots, part_of // num_slots % span
    home_group, home = homes.ranks // span, homes.ranks % span
    pairs, tokens = sum_by_key(group * num_groups + home_group, homes.tokens)
    groups = assign_greedily(
        pairs // num_groups,
        places=pairs % num_groups,
        benefits=tokens,
        num_parts=num_groups,
        num_problems=1,
    )
    near = np.flatnonzero(groups[group] == home_group)
    first = (group[near] * num_slots + slot[near]) * span
    pairs, tokens = sum_by_key((first + part[near]) * span + home[near], homes.tokens[near])
    parts = pairs // span
    places = assign_greedily(
        parts,
        places=parts // span * span + pairs % span,
        benefits=tokens,
        num_parts=span,
        num_problems=num_groups * num_slots,
    )
    places = (places % span).reshape(num_groups, num_slots, span)
    return (groups[:, None, None] * span + places.transpose(0, 2, 1)).reshape(-1)


def _exchange_equal(
    problem: Problem, slot_of: NDArray[np.int64], *, num_microbatches: int, homes: Homes
) -> NDArray[np.int64]:
    """Exchanges samples of equal cost and weight: to their home rank first, then to its node."""
    kinds = problem.kinds
    kind_of = kinds.of_samples
    # Long samples choose first.
    equal = np.flatnonzero(kinds.counts[kind_of] > 1)
    samples = equal[stable_order(-homes.tokens[equal])]
    positions = equal

    slot_of = slot_of.copy()
    old = slot_of.copy()
    for width in (1, homes.ranks_per_node):
        if width is None:
            break
        num_places = -(-problem.topology.dp_size // width)
        wanted = kind_of[samples] * num_places + homes.ranks[samples] // width
        offered = kind_of[positions] * num_places + old[positions] // num_microbatches // width
        matched_samples, matched_positions = _match(wanted, offered)
        slot_of[samples[matched_samples]] = old[positions[matched_positions]]
        samples, positions = np.delete(samples, matched_samples), np.delete(positions, matched_positions)
    # Of each kind there are as many positions left as samples.
    samples, positions = samples[stable_order(kind_of[samples])], positions[stable_order(kind_of[positions])]
    slot_of[samples] = old[positions]
    return slot_of


def _match(wanted: NDArray[np.int64], offered: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pairs entries of equal value, first with first: their indices in both, `[num_pairs]` each."""
    keys: list[NDArray[np.int64]] = []
    orders: list[NDArray[np.int64]] = []
    for values in (wanted, offered):
        order = stable_order(values)
        ascending = values[order]
        indices = np.arange(values.size)
        starts = np.maximum.accumulate(np.where(run_starts(ascending), indices, 0))
        keys.append(ascending * (values.size + 1) + indices - starts)
        orders.append(order)
    # Both ascend, without equal ones.
    places = keys[1].searchsorted(keys[0])
    paired = np.append(keys[1], -1)[places] == keys[0]
    return orders[0][paired], orders[1][places[paired]]
