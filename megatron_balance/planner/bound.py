"""Lower bounds of plans: on the work of the slowest sync group, and on the micro-batches of every rank.

Each is sound on integers, never above the best plan:

mean        the work of all, spread evenly over all ranks
largest     one sample, with its part of expert work, runs whole on one rank
pigeonhole  among the k*D + 1 costliest samples some of D ranks holds k + 1
forced      at most k samples heavier than cap/(k+1) share a micro-batch, so that the i longest slots of e ranks hold
            at most k*i*e of them, and the next slot lasts at least as long as the costliest of the others. What the i
            longest slots cannot hold is spread evenly over all slots.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from megatron_balance.planner.problem import INT_MAX, Ints, sums

if TYPE_CHECKING:
    from megatron_balance.planner.batch import ForestBatch, SizedBatch
    from megatron_balance.planner.level_packing import Batch

_MAX_SHARING = 4
"""Forced slots look at samples of which at most this many share a micro-batch."""


def min_slots(batch: Batch) -> int:
    """Micro-batches that hold all weight, and at most k samples heavier than cap/(k+1) each."""
    weights = batch.weights[batch.weights <= batch.cap]
    heavy = [-(-int(((count + 1) * weights > batch.cap).sum()) // count) for count in range(1, _MAX_SHARING + 1)]
    bins = batch.oversized.size + max(-(-int(weights.sum()) // batch.cap), *heavy)
    return max(-(-bins // (batch.num_ranks * batch.multiple)), 1) * batch.multiple


def min_work(batch: Batch) -> int:
    """Work of the slowest sync group."""
    costs, expert = batch.costs.sum(axis=0), int(batch.expert_cost.sum())
    work = max(-(-(int(costs.sum()) + expert) // batch.num_ranks), largest_sample(batch))
    if batch.sync_size == 1:
        return max(work, _pigeonhole(costs, num_ranks=batch.num_ranks))
    # Ranks that wait for the costliest sample may compute expert work of a smaller group meanwhile.
    added = expert if batch.sync_size == batch.ep_dp_size else 0
    return max(work, -(-(_with_forced_slots(batch, costs) + added) // batch.num_ranks))


def slowest_stage(batch: Batch, num_slots: int) -> int:
    """Time of the stage with most work, where stages differ: no rank's is below the mean of all ranks."""
    pipeline, work = batch.waiting.pipeline, list[int]()
    for kind in batch.kinds:
        total = int(kind.costs.sum()) + int(kind.expert_cost.sum())
        work.append(total + num_slots * batch.num_ranks * kind.per_microbatch)
    longest = max((sum(work[kind] for kind in stage) for stage in pipeline.kinds), default=0)
    return -(-longest // (batch.num_ranks * pipeline.num_stages * pipeline.num_chunks))


def largest_sample(batch: Batch) -> int:
    """Cost of the costliest sample with its part of expert work."""
    return int((batch.costs.sum(axis=0) + -(-batch.expert_cost // batch.ep_dp_size)).max(initial=0))


def _pigeonhole(costs: Ints, *, num_ranks: int) -> int:
    """Max over k of the k+1 smallest of the k*num_ranks + 1 costliest."""
    totals = np.concatenate([[0], np.cumsum(np.sort(costs)[::-1])])
    ends = np.arange(num_ranks + 1, costs.size + 1, num_ranks)
    return int((totals[ends] - totals[ends - np.arange(2, ends.size + 2)]).max(initial=0))


def _with_forced_slots(batch: Batch, costs: Ints) -> int:
    """Cost of all samples on their ranks, and what ranks idle in slots that large samples force to last long."""
    total, width, cap = int(costs.sum()), batch.sync_size, batch.cap
    order = np.argsort(-costs, kind="stable")
    costs, weights = costs[order], batch.weights[order].clip(max=cap)
    forced = costs[:1]
    for count in range(1, _MAX_SHARING + 1):
        loads = costs[(count + 1) * weights > cap][:: count * width]
        short, long = sorted((forced, loads), key=len)
        forced = np.concatenate([np.maximum(short, long[: short.size]), long[short.size :]])
    capacities = _fractional_knapsack(costs, weights, width * cap * np.arange(forced.size + 1))
    times = accumulate(forced.tolist(), initial=0)
    return max(width * time + total - capacity for time, capacity in zip(times, capacities, strict=True))


def _fractional_knapsack(costs: Ints, weights: Ints, rooms: Ints) -> list[int]:
    """The largest cost that fits in each of some rooms, samples cut freely, rounded up."""
    # Cost for each unit of weight, with as many bits behind the point as int64 has to spare.
    bits = max(61 - int(costs.max(initial=0)).bit_length(), 0)
    density = np.where(weights > 0, (costs << bits) // np.maximum(weights, 1), INT_MAX)
    order = np.argsort(-density, kind="stable")
    costs, weights = costs[order], weights[order]
    cost_before, weight_before = ([0, *np.cumsum(values).tolist()] for values in (costs, weights))
    cut: list[int] = np.searchsorted(np.cumsum(weights), rooms, side="right").tolist()
    # Samples whose densities differ behind these bits may stand in the wrong order.
    slack = (weight_before[-1] >> bits) + 1
    capacities: list[int] = []
    for room, index in zip(rooms.tolist(), cut, strict=True):
        cost = cost_before[index]
        if index < costs.size:
            cost += -(-(room - weight_before[index]) * int(costs[index]) // int(weights[index])) + slack
        capacities.append(min(cost, cost_before[-1]))
    return capacities


def min_work_of_sizes(batch: SizedBatch) -> int:
    """Work of the most loaded rank where each sample has a context-parallel size.

    In a time T a sample runs at a size with room for its tokens at which its cost on each rank is at most T. Its total
    cost is least at the smallest such size, because every further rank adds communication. So T is possible only if
    these costs fit on the ranks, and for every size those of this size and larger ones fit on the ranks that
    micro-batches of this size cover. The least such T is found by halving. The work of experts comes on top where all
    ranks share it; where smaller groups do, it may fill what ranks idle.
    """
    if not batch.num_samples:
        return batch.per_microbatch
    num_ranks = batch.dp_cp_size
    num_slots = num_ranks * batch.min_slots if batch.equal_counts else max(num_ranks, batch.min_room // batch.cap)
    shares_all, expert = batch.ep_dp_size >= num_ranks, int(batch.expert_cost[0].sum())
    fixed = batch.per_microbatch * num_slots + (0 if shares_all else expert)
    low, high = 0, int(batch.costs[0].sum() + batch.at(batch.costs, batch.min_levels).sum())
    high += expert + batch.per_microbatch * (num_slots + 1)
    while low < high:
        middle = (low + high) // 2
        if _is_possible(batch, middle, fixed=fixed):
            high = middle
        else:
            low = middle + 1
    return low + (-(-expert // num_ranks) if shares_all else 0)


def _is_possible(batch: SizedBatch, time: int, *, fixed: int) -> bool:
    """False where no plan ends within `time`. `fixed`: cost over all ranks whatever the sizes."""
    levels = batch.levels_within(time - batch.per_microbatch)
    costs = batch.at(batch.costs, levels)
    if int(costs.max()) > time - batch.per_microbatch:
        return False
    areas: list[int] = np.cumsum(sums(costs << levels, levels, batch.num_levels)[::-1])[::-1].tolist()
    if areas[0] + fixed > time * batch.dp_cp_size:
        return False
    return all(area <= time * (batch.dp_cp_size >> level << level) for level, area in enumerate(areas))


def min_time_of_forest(batch: ForestBatch) -> int:
    """A time that no plan of a forest can beat, however it cuts trees.

    A micro-batch with node v holds at most `cap - end(v)` tokens below it, and in a time T a rank with v has T less the
    path to v for the cost below it: so many copies of v there are at least, and as many as of a child. T is possible
    only if all copies fit on the ranks; the least is found by halving. An over-long sample fills a micro-batch.
    """
    ends, forest = batch.ends, batch.forest
    used = np.zeros(ends.num_samples, dtype=np.bool_)
    used[forest.paths[forest.paths >= 0]] = True
    path_tokens, path_costs = ends.weights.clip(max=ends.cap), ends.costs.sum(axis=0)
    tokens = np.where(used, path_tokens - path_tokens[np.append(forest.parent, -1)], 0)
    costs = np.where(used, batch.nodes.costs.sum(axis=0), 0)
    work = costs + np.where(used, batch.nodes.expert_cost, 0)

    def copies(values: Ints, room: Ints) -> Ints:
        """Of each node, if a copy leaves so much room for what is below it."""
        least, below = used.astype(np.int64), np.zeros_like(values)
        for nodes in reversed(forest.levels):
            least[nodes] = np.maximum(least[nodes], -(-below[nodes] // np.maximum(room[nodes], 1)))
            parents = forest.parent[nodes]
            np.maximum.at(least, parents, least[nodes])
            np.add.at(below, parents, least[nodes] * values[nodes] + below[nodes])
        return least

    by_tokens = copies(tokens, ends.cap - path_tokens)
    slots = -(-int(by_tokens @ tokens) // ends.cap)
    slots = max(-(-slots // (ends.num_ranks * ends.multiple)), 1) * ends.multiple
    largest = largest_sample(batch.alone)
    low = max(largest, -(-int(work.sum()) // ends.num_ranks))
    high = max(low, int(batch.alone.costs.sum() + batch.alone.expert_cost.sum()))
    while low < high:
        time = (low + high) // 2
        needed = int(np.maximum(by_tokens, copies(costs, time - path_costs)) @ work)
        low, high = (low, time) if needed <= time * ends.num_ranks else (time + 1, high)
    fixed = ends.per_microbatch
    work = max(low + slots * fixed, slots * ends.gather)
    return ends.waiting.at_least(work, empty=fixed, longest=largest + fixed)
