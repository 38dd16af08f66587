"""Relabels the ranks and slots of a plan so that fewer tokens move, at unchanged cost.

Ranks are equal, so the cost depends on which samples run together and not on where. Interchangeable are:

    where ranks meet once a step          whole ranks
    where they meet in every micro-batch  groups of ranks that meet, and in each slot the micro-batches of a group
    everywhere                            samples of the same cost and the same weight, wherever they are

Where an expert-parallel group shares work, only its own ranks, and whole groups, are interchangeable. Each choice takes
the pair that keeps most tokens on their home rank, then most on the node of that rank, again and again.
"""

from __future__ import annotations

import numpy as np

from megatron_balance.planner.batch import Batch, sums
from megatron_balance.planner.inputs import Ints, Problem

MAX_NEAR = 2**20
"""Most pairs of a part and a place on the node of its samples' home; larger problems are solved without nodes."""

_Benefits = tuple[Ints, Ints, Ints]
"""Parts, rising, their places, and what each pair keeps."""


def keep_local(
    batch: Batch, microbatch_of: Ints, *, num_microbatches: int, problem: Problem, whole_ranks: bool = False
) -> Ints:
    """Exchanges equal ranks, micro-batches and samples so that fewer tokens move, at the same cost.

    With `whole_ranks` samples of one rank stay on one rank.
    """
    if batch.num_ranks == 1 or not microbatch_of.size:
        return microbatch_of

    def moved(slots: Ints) -> list[int]:
        return [
            problem.moved_tokens(slots // num_microbatches, width=width)
            for width in (1, problem.ranks_per_node)
            if width
        ]

    # Each is kept where it moves fewer tokens, or as many and fewer between nodes: the first of equals.
    best = min(
        (microbatch_of, _permute(batch, microbatch_of, num_microbatches, problem, whole_ranks=whole_ranks)), key=moved
    )
    return best if whole_ranks else min((best, _exchange_equal(batch, best, num_microbatches, problem)), key=moved)


def _permute(batch: Batch, microbatch_of: Ints, num_microbatches: int, problem: Problem, *, whole_ranks: bool) -> Ints:
    """Permutes groups of ranks, and inside them ranks or the micro-batches of a slot."""
    # Ranks that meet in every micro-batch wait for the costliest of a slot, whichever of them runs it.
    per_slot = batch.span > 1 and not whole_ranks
    span = batch.span if batch.span > 1 else batch.num_ranks
    if batch.shared.any():
        span = batch.expert_span
    num_groups, num_slots = batch.num_ranks // span, num_microbatches if per_slot else 1
    rank, slot = np.divmod(microbatch_of, num_microbatches)
    group, column = np.divmod(rank, span)
    groups = _match_greedily(*_benefits(group, problem, width=span, num_places=num_groups), size=num_groups)
    # Inside a group that has found its place, parts are its ranks, or the micro-batches of each slot.
    parts = (group * num_slots + (slot if per_slot else 0)) * span + column
    part, place, benefit = _benefits(parts, problem, width=1, num_places=batch.num_ranks)
    inside = place // span == groups[part // (span * num_slots)]
    part, place, benefit = part[inside], place[inside], benefit[inside]
    size = num_groups * num_slots * span
    places = _match_greedily(part, part // span * span + place % span, benefit, size=size)
    return (groups[group] * span + places[parts] % span) * num_microbatches + slot


def _benefits(part: Ints, problem: Problem, *, width: int, num_places: int) -> _Benefits:
    """Tokens that each part keeps at each place, which is `width` ranks; of `part` each sample's.

    A token at home counts more than all tokens on their node, as far as int64 allows.
    """
    homes, per_node = problem.home_ranks, problem.ranks_per_node
    assert homes is not None
    if per_node is None or per_node <= width:
        return _summed(part, homes // width, problem.lengths)
    of_node, first, tokens = _summed(part, homes // per_node * per_node // width, problem.lengths)
    places = first[:, None] + np.arange(per_node // width)
    if places.size > MAX_NEAR:
        return _summed(part, homes // width, problem.lengths)
    total = int(problem.lengths.sum()) + 1
    parts = np.concatenate([part, of_node.repeat(places.shape[1])])
    benefits = np.concatenate([problem.lengths * min(total, 2**61 // total), tokens.repeat(places.shape[1])])
    return _summed(parts, np.concatenate([homes // width, places.reshape(-1).clip(max=num_places - 1)]), benefits)


def _summed(part: Ints, place: Ints, benefits: Ints) -> _Benefits:
    """The sum of benefits of each pair that occurs."""
    num_places = int(place.max(initial=0)) + 1
    keys, of_key = np.unique(part * num_places + place, return_inverse=True)
    return keys // num_places, keys % num_places, sums(benefits, of_key.reshape(-1), keys.size)


def _match_greedily(parts: Ints, places: Ints, benefits: Ints, *, size: int) -> Ints:
    """Gives each of `size` parts a place of its own, the largest benefit first, in many problems at once.

    In each round every benefit that is the largest left of its part and of its place is taken. That is what taking them
    one by one leads to, in a few passes over arrays. Parts and places are numbered through all problems. Those that no
    benefit joins meet in their order: every problem has as many of the ones as of the others.
    """
    place_of, taken = np.full(size, -1, dtype=np.int64), np.zeros(size, dtype=np.bool_)
    order = np.argsort(-benefits, kind="stable")
    parts, places = parts[order], places[order]
    while parts.size:
        position = np.arange(parts.size)
        first_of_part, first_of_place = np.zeros((2, size), dtype=np.int64)
        # Assigned backwards, so that the first entry stays.
        first_of_part[parts[::-1]] = position[::-1]
        first_of_place[places[::-1]] = position[::-1]
        chosen = (first_of_part[parts] == position) & (first_of_place[places] == position)
        place_of[parts[chosen]] = places[chosen]
        taken[places[chosen]] = True
        left = (place_of[parts] < 0) & ~taken[places]
        parts, places = parts[left], places[left]
    place_of[place_of < 0] = np.flatnonzero(~taken)
    return place_of


def _exchange_equal(batch: Batch, microbatch_of: Ints, num_microbatches: int, problem: Problem) -> Ints:
    """Exchanges samples of equal cost and weight, long ones first: to their home rank, then to its node."""
    assert problem.home_ranks is not None
    columns = np.vstack([batch.costs, batch.shared[None], batch.weights[None]])
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
        num_places = -(-batch.num_ranks // width)
        wanted = kind_of[samples] * num_places + problem.home_ranks[samples] // width
        offered = kind_of[positions] * num_places + old[positions] // num_microbatches // width
        one, other = _pair_equal(wanted, offered)
        microbatch_of[samples[one]] = old[positions[other]]
        samples, positions = np.delete(samples, one), np.delete(positions, other)
    # Of each kind there are as many positions left as samples.
    samples, positions = (ids[np.argsort(kind_of[ids], kind="stable")] for ids in (samples, positions))
    microbatch_of[samples] = old[positions]
    return microbatch_of


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
