"""Relabels the ranks and slots of a plan so that fewer tokens move, at unchanged cost.

Ranks are equal, so the cost depends on which samples run together and not on where. Interchangeable are:

    where ranks meet once a step          whole ranks
    where they meet in every micro-batch  groups of ranks that meet, and in each slot the micro-batches of a group
    everywhere                            samples of the same cost and the same weight, wherever they are

Where an expert-parallel group shares work, only its own ranks, and whole groups, are interchangeable. Each choice takes
the pair that keeps most tokens on their home rank, then most on the node of that rank, again and again.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import numpy as np

from megatron_balance.planner.batch import Batch
from megatron_balance.planner.inputs import Ints

MAX_TABLE = 2**19
"""Most entries of a table of parts times ranks; larger problems are solved by samples, without nodes."""


@dataclass(frozen=True, eq=False)
class Homes:
    """The home ranks of samples, and their tokens.

    Attributes:
        ranks: `[num_samples]` int64 rank that loaded each sample.
        tokens: `[num_samples]` int64 original tokens.
        ranks_per_node: data-parallel ranks of one node; None if nodes do not matter.
    """

    ranks: Ints
    _: KW_ONLY
    tokens: Ints
    ranks_per_node: int | None = None

    def moved_tokens(self, ranks: Ints) -> int:
        """Tokens off their home rank, for `[num_samples]` ranks that run them."""
        return int(self.tokens[ranks != self.ranks].sum())

    def moved_off_node_tokens(self, ranks: Ints) -> int:
        """Tokens off the node of their home rank; 0 if nodes do not matter."""
        if self.ranks_per_node is None:
            return 0
        return int(self.tokens[ranks // self.ranks_per_node != self.ranks // self.ranks_per_node].sum())


def keep_local(batch: Batch, slot_of: Ints, *, num_microbatches: int, homes: Homes, whole_ranks: bool = False) -> Ints:
    """Exchanges equal ranks, micro-batches and samples so that fewer tokens move, at the same cost.

    With `whole_ranks` samples of one rank stay on one rank.
    """
    if batch.num_ranks == 1 or not slot_of.size:
        return slot_of

    def moved(slots: Ints) -> tuple[int, int]:
        ranks = slots // num_microbatches
        return homes.moved_tokens(ranks), homes.moved_off_node_tokens(ranks)

    # Each is kept where it moves fewer tokens, or as many and fewer between nodes: the first of equals.
    found = _permute(batch, slot_of, num_microbatches=num_microbatches, homes=homes, whole_ranks=whole_ranks)
    best = min((slot_of, found), key=moved)
    if whole_ranks:
        return best
    again = _exchange_equal(batch, best, num_microbatches=num_microbatches, homes=homes)
    return min((best, again), key=moved)


def _permute(batch: Batch, slot_of: Ints, *, num_microbatches: int, homes: Homes, whole_ranks: bool) -> Ints:
    """Permutes groups of ranks, and inside them ranks or the micro-batches of a slot."""
    # Ranks that meet in every micro-batch wait for the costliest of a slot, whichever of them runs it.
    per_slot = batch.span > 1 and not whole_ranks
    span = batch.span if batch.span > 1 else batch.num_ranks
    if batch.shared.any():
        span = batch.expert_span
    num_groups, num_slots = batch.num_ranks // span, num_microbatches if per_slot else 1
    rank, slot = np.divmod(slot_of, num_microbatches)
    group, column = np.divmod(rank, span)
    home_group = homes.ranks // span
    groups = _match_greedily(*_kept(group, home_group, homes, num_groups, span), num_parts=num_groups, num_problems=1)
    # Inside a group that has found its place, parts are its ranks, or the micro-batches of each slot.
    first = (group * num_slots + (slot if per_slot else 0)) * span
    parts = num_groups * num_slots * span
    if parts * span <= MAX_TABLE and homes.ranks_per_node is not None:
        entries = _with_nodes(first + column, groups[group] * span, homes=homes, num_parts=parts, span=span)
    else:
        near = np.flatnonzero(groups[group] == home_group)
        entries = _summed((first + column)[near], homes.ranks[near] % span, homes.tokens[near], span)
    part, place, benefit = entries
    places = _match_greedily(part, part // span * span + place, benefit, num_parts=span, num_problems=parts // span)
    new_rank = groups[group] * span + places[first + column] % span
    return new_rank * num_microbatches + slot


def _kept(group: Ints, home_group: Ints, homes: Homes, num_groups: int, span: int) -> tuple[Ints, Ints, Ints]:
    """Tokens that each group keeps at each group's place; those on the place's nodes count less than any at home."""
    part, place, benefit = _summed(group, home_group, homes.tokens, num_groups)
    if homes.ranks_per_node is None or num_groups**2 > MAX_TABLE:
        return part, place, benefit
    table = np.zeros((num_groups, num_groups), dtype=np.int64)
    table[part, place] = benefit * _node_weight(homes)
    home_node = homes.ranks // homes.ranks_per_node
    on_node = np.zeros((num_groups, int(home_node.max()) + 1), dtype=np.int64)
    np.add.at(on_node, (group, home_node), homes.tokens)
    node_of_place = (np.arange(num_groups) * span // homes.ranks_per_node).clip(max=on_node.shape[1] - 1)
    table += on_node[:, node_of_place]
    part, place = np.nonzero(table)
    return part, place, table[part, place]


def _with_nodes(part_of: Ints, first_rank: Ints, *, homes: Homes, num_parts: int, span: int) -> tuple[Ints, Ints, Ints]:
    """Part, place and benefit of every pair: a token at home counts more than all tokens on their node."""
    assert homes.ranks_per_node is not None
    table = np.zeros((num_parts, span), dtype=np.int64)
    weight = _node_weight(homes)
    for place in range(span):
        rank = first_rank + place
        at_home, on_node = rank == homes.ranks, rank // homes.ranks_per_node == homes.ranks // homes.ranks_per_node
        np.add.at(table[:, place], part_of[on_node], homes.tokens[on_node])
        np.add.at(table[:, place], part_of[at_home], homes.tokens[at_home] * weight)
    part, place = np.nonzero(table)
    return part, place, table[part, place]


def _node_weight(homes: Homes) -> int:
    """More than all tokens together, as far as int64 allows."""
    total = int(homes.tokens.sum()) + 1
    return min(total, 2**61 // total)


def _summed(part: Ints, place: Ints, tokens: Ints, num_places: int) -> tuple[Ints, Ints, Ints]:
    """Parts, places and the sum of tokens of each pair that occurs, parts rising."""
    keys, of_key = np.unique(part * num_places + place, return_inverse=True)
    benefits = np.zeros(keys.size, dtype=np.int64)
    np.add.at(benefits, of_key.reshape(-1), tokens)
    return keys // num_places, keys % num_places, benefits


def _match_greedily(parts: Ints, places: Ints, benefits: Ints, *, num_parts: int, num_problems: int) -> Ints:
    """Gives every part a place of its own, the largest benefit first, in many problems at once.

    In each round every benefit that is the largest left of its part and of its place is taken. That is what taking them
    one by one leads to, in a few passes over arrays. Parts and places are numbered through all problems, and rise.
    Those that no benefit joins meet in their order.
    """
    total = num_problems * num_parts
    place_of, taken = np.full(total, -1, dtype=np.int64), np.zeros(total, dtype=np.bool_)
    order = np.argsort(-benefits, kind="stable")
    parts, places = parts[order], places[order]
    while parts.size:
        position = np.arange(parts.size)
        first_of_part, first_of_place = np.zeros((2, total), dtype=np.int64)
        # Assigned backwards, so that the first entry stays.
        first_of_part[parts[::-1]] = position[::-1]
        first_of_place[places[::-1]] = position[::-1]
        chosen = (first_of_part[parts] == position) & (first_of_place[places] == position)
        place_of[parts[chosen]] = places[chosen]
        taken[places[chosen]] = True
        left = (place_of[parts] < 0) & ~taken[places]
        parts, places = parts[left], places[left]
    # Both rise, and every problem has as many of the ones as of the others.
    place_of[place_of < 0] = np.flatnonzero(~taken)
    return place_of


def _exchange_equal(batch: Batch, slot_of: Ints, *, num_microbatches: int, homes: Homes) -> Ints:
    """Exchanges samples of equal cost and weight, long ones first: to their home rank, then to its node."""
    columns = np.vstack([batch.costs, batch.shared[None], batch.weights[None]])
    order = np.lexsort(columns)
    differs = (np.diff(columns[:, order], axis=1) != 0).any(axis=0)
    kind_of = np.empty_like(order)
    kind_of[order] = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(differs)])
    positions = np.flatnonzero(np.bincount(kind_of)[kind_of] > 1)
    samples = positions[np.argsort(-homes.tokens[positions], kind="stable")]
    old, slot_of = slot_of, slot_of.copy()
    for width in (1, homes.ranks_per_node):
        if width is None:
            break
        num_places = -(-batch.num_ranks // width)
        wanted = kind_of[samples] * num_places + homes.ranks[samples] // width
        offered = kind_of[positions] * num_places + old[positions] // num_microbatches // width
        one, other = _pair_equal(wanted, offered)
        slot_of[samples[one]] = old[positions[other]]
        samples, positions = np.delete(samples, one), np.delete(positions, other)
    # Of each kind there are as many positions left as samples.
    samples, positions = (ids[np.argsort(kind_of[ids], kind="stable")] for ids in (samples, positions))
    slot_of[samples] = old[positions]
    return slot_of


def _pair_equal(wanted: Ints, offered: Ints) -> tuple[Ints, Ints]:
    """Pairs entries of equal value, first with first: their indices in both, `[num_pairs]` each."""
    orders = [np.argsort(values, kind="stable") for values in (wanted, offered)]
    keys: list[Ints] = []
    for values, order in zip((wanted, offered), orders, strict=True):
        rising = values[order]
        keys.append(rising * (values.size + 1) + np.arange(values.size) - rising.searchsorted(rising))
    # Both rise, without equal ones.
    places = keys[1].searchsorted(keys[0])
    paired = np.append(keys[1], -1)[places] == keys[0]
    return orders[0][paired], orders[1][places[paired]]
