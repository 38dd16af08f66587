"""Lower bounds on the time of any plan of a global batch.

Every bound is sound (never above the best possible plan) but may not be reachable. All arithmetic is on integers;
fractions are rounded to the safe side.

    step        the mean over ranks; the largest sample; and by the pigeonhole principle, among the k*D+1
                costliest samples some rank holds k+1 of them
    microbatch  for every i: sorted by height, the first i slots are at least as high as the samples that
                cannot share a micro-batch force them to be, and what the first i slots cannot hold is
                spread evenly over the rest
    pipeline    the work of a stage, plus the ends where it idles; one micro-batch through all stages
                (with expert-parallel groups in a pipeline, the bound for `microbatch` is the work)

Each is a bound on work (`Objective.least_work`), to which the micro-batches that samples need at least add their fixed
costs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from megatron_balance.planner.bounds.bins import min_num_bins
from megatron_balance.planner.bounds.experts import expert_bound
from megatron_balance.planner.kinds import Kinds
from megatron_balance.planner.problem import Problem

_PARTS = 4
"""Means of two weights are taken in quarters."""

_MOST_SHARING = 4
"""Forced heights look at samples of which at most this many share a micro-batch."""


@dataclass(frozen=True)
class SlotFloor:
    """Bounds on the slots of ranks that meet in every micro-batch.

    Attributes:
        forced_heights: `[num_forced]` falling: the i-th highest slot costs at least this, because of
            large samples that cannot share a micro-batch.
        held_costs: `[num_forced + 1]`: the most that the first i slots of all ranks that meet can hold.
        num_high: slots at the front that the bound takes as forced; the rest is even.
        total_cost: the bound times `dp_size`.
    """

    forced_heights: tuple[int, ...]
    held_costs: tuple[int, ...]
    num_high: int
    total_cost: int


def min_num_microbatches(problem: Problem) -> int:
    """Micro-batches that every rank needs at least, a multiple of `microbatch_multiple`."""
    multiple = problem.topology.microbatch_multiple
    num_bins = min_num_bins(problem.weights, capacity=problem.capacity)
    return -(-num_bins // (problem.topology.dp_size * multiple)) * multiple


def slot_floor(problem: Problem, *, sync_group_size: int, in_bins: bool = False) -> SlotFloor:
    """Bounds the mean over groups of the sum over slots of the costliest rank's own cost.

    With e = `sync_group_size`, T the capacity, B[i] the height that the i-th highest slot is forced to, C the total
    cost and U(i) the most that i slots of e ranks can hold, a fractional knapsack of i*e*T, the bound is max
    over i of `sum(B[:i]) + (C - U(i)) / e` over all groups together.

    Args:
        problem: the global batch.
        sync_group_size: ranks that meet in every micro-batch.
        in_bins: U(i) also takes into account that samples are not cut, which costs five times the time.

    Returns:
        SlotFloor: the bound at the best i.
    """
    kinds, capacity = problem.kinds, problem.capacity
    forced = _forced_heights(kinds, capacity=capacity, sync_group_size=sync_group_size)
    total = int(problem.costs.sum())
    rooms = [num_high * sync_group_size * capacity for num_high in range(len(forced) + 1)]
    held = _most_cost_within(kinds, rooms, capacity=capacity)
    if in_bins:
        of_whole = _most_cost_in_bins(kinds, rooms, capacity=capacity)
        held = [min(several) for several in zip(held, *of_whole, strict=True)]
        if forced:
            # Samples beside the costliest one only make the highest slot higher.
            others = kinds.counts.copy()
            others[0] -= 1
            room = (sync_group_size - 1) * capacity
            beside = _most_cost_within(replace(kinds, counts=others), [room], capacity=capacity)[0]
            held[1] = min(held[1], forced[0] + beside)
    values = [
        sync_group_size * forced_cost + total - kept
        for forced_cost, kept in zip(accumulate(forced, initial=0), held, strict=True)
    ]
    num_high = max(range(len(values)), key=lambda i: (values[i], -i))
    return SlotFloor(
        forced_heights=tuple(forced),
        held_costs=tuple(held),
        num_high=num_high,
        total_cost=values[num_high],
    )


def even_work(problem: Problem) -> int:
    """Work of the fullest rank at least: an even share of all, or the largest sample."""
    own, shared = int(problem.costs.sum()), int(problem.shared_costs.sum())
    return max(-(-(own + shared) // problem.topology.dp_size), _largest_sample(problem))


def meeting_work(problem: Problem) -> int:
    """Time of the slowest group of ranks that meet in every micro-batch at least, without `per_microbatch`."""
    spread = slot_floor(problem, sync_group_size=problem.sync_group_size, in_bins=True).total_cost
    # With several expert-parallel groups, ranks that wait for the costliest sample may compute their own group's share.
    shared = int(problem.shared_costs.sum()) if problem.sync_group_size == problem.topology.ep_span else 0
    even = max(-(-(spread + shared) // problem.topology.dp_size), even_work(problem))
    return expert_bound(problem, at_least=even)


def least_time(problem: Problem, *, work: int, num_microbatches: int) -> int:
    """A time that no plan with this many micro-batches or more can beat.

    Args:
        problem: the global batch.
        work: lower bound on the work of the slowest group, see `Objective.least_work`.
        num_microbatches: of every rank.
    """
    launch = problem.per_microbatch
    return problem.timing.at_least(
        work + num_microbatches * launch, launch=launch, longest=_largest_sample(problem) + launch
    )


def lower_bound(problem: Problem) -> int:
    """A time that no plan which may move samples can beat."""
    work = problem.objective.least_work(problem)
    return least_time(problem, work=work, num_microbatches=min_num_microbatches(problem))


def _largest_sample(problem: Problem) -> int:
    """A sample runs whole on one rank, and its shared part is split over the expert-parallel group."""
    span = problem.topology.ep_span
    return int((problem.costs + -(-problem.shared_costs // span)).max(initial=0))


def _forced_heights(kinds: Kinds, *, capacity: int, sync_group_size: int) -> list[int]:
    """Falling heights below which the i-th highest slot of all ranks that meet cannot be, `[num_forced]`.

    At most k of the samples heavier than T/(k+1) share a micro-batch, so i slots of e ranks hold at most
    k*i*e of them: the costliest but k*i*e stands in a slot behind. The highest slot holds the costliest of all.
    """
    forced = kinds.costs[:1].copy()
    for most in range(1, _MOST_SHARING + 1):
        is_heavy = (most + 1) * kinds.weights > capacity
        ends = np.cumsum(kinds.counts[is_heavy])
        firsts = np.arange(0, ends[-1] if ends.size else 0, most * sync_group_size)
        heights = kinds.costs[is_heavy][ends.searchsorted(firsts, side="right")]
        short, long = sorted((forced, heights), key=len)
        forced = long.copy()
        np.maximum(forced[: short.size], short, out=forced[: short.size])
    return forced.tolist()


def single_sample_floor(problem: Problem) -> float:
    """The largest sample over a rank's even share of the total cost, at least 1.0.

    No plan brings max over mean below it: the rank of that sample ends last in every plan.
    """
    total = int(problem.costs.sum())
    largest = int(problem.costs.max(initial=0))
    return max(1.0, largest * problem.topology.dp_size / total) if total else 1.0


def pigeonhole(costs: NDArray[np.int64], *, num_parts: int) -> int:
    """Max over k of the k+1 smallest of the k*num_parts + 1 costliest: some part holds k+1 of these."""
    falling = np.sort(costs)[::-1]
    sums = np.concatenate([[0], np.cumsum(falling)])
    ends = np.arange(num_parts + 1, costs.size + 1, num_parts)
    held = np.arange(2, ends.size + 2)
    return int((sums[ends] - sums[ends - held]).max(initial=0))


def _most_cost_in_bins(kinds: Kinds, rooms: list[int], *, capacity: int) -> list[list[int]]:
    """The most cost that a number of micro-batches can hold, samples whole: knapsacks of other weights.

    A dual feasible function (S. P. Fekete and J. Schepers, 2001) gives the samples of any micro-batch that keeps its
    capacity weights of at most 1 in sum: their own over the capacity T; steps, floor((k+1)w/T)/k; and any mean of two.
    So a knapsack of such weights is a bound as well.

    Returns:
        for each function, `[num_queries]` costs.
    """
    weights = np.minimum(kinds.weights, capacity)
    if capacity * _PARTS * 2 * max(int(kinds.counts.sum()), 1) >= 2**61:
        return []
    held: list[list[int]] = []
    for steps in (1, 2):
        whole, rest = np.divmod((steps + 1) * weights, capacity)
        stepped = np.where(rest == 0, weights * steps, whole * capacity)
        for parts in (1, 2):
            # In units of 1/(steps * _PARTS * T).
            mixed = (_PARTS - parts) * steps * weights + parts * stepped
            unit = steps * _PARTS
            other = replace(kinds, weights=mixed)
            held.append(_most_cost_within(other, [room * unit for room in rooms], capacity=capacity * unit))
    return held


def _most_cost_within(kinds: Kinds, rooms: list[int], *, capacity: int) -> list[int]:
    """The most cost that an amount of room can hold, samples cut freely: a fractional knapsack.

    An over-long sample takes one micro-batch, so it counts as `capacity` and never more.

    Args:
        kinds: of the samples.
        rooms: `[num_queries]` room, tokens or samples.
        capacity: of a micro-batch.

    Returns:
        `[num_queries]` costs, rounded up.
    """
    weights = np.minimum(kinds.weights, capacity)
    # By falling cost a token. Samples without weight come first.
    densities = np.where(weights > 0, kinds.costs / np.maximum(weights, 1), np.inf)
    order = np.argsort(-densities, kind="stable")
    if not order.size:
        return [0] * len(rooms)
    costs, weights, counts = kinds.costs[order], weights[order], kinds.counts[order]
    cost_sums, weight_sums = np.cumsum(costs * counts), np.cumsum(weights * counts)
    # The kinds that are cut.
    cut: list[int] = weight_sums.searchsorted(np.array(rooms, dtype=np.int64), side="right").tolist()
    # Python integers: a room times a cost passes int64.
    costs_of: list[int] = costs.tolist()
    weights_of: list[int] = weights.tolist()
    cost_before: list[int] = [0, *cost_sums.tolist()]
    weight_before: list[int] = [0, *weight_sums.tolist()]
    held: list[int] = []
    for room, index in zip(rooms, cut, strict=True):
        cost = cost_before[index]
        if index < len(costs_of):
            cost += -(-(room - weight_before[index]) * costs_of[index] // weights_of[index])
            # Densities are rounded, so that neighbours may stand in the wrong order by one part in 2**52.
            cost += (cost >> 48) + 1
        held.append(min(cost, cost_before[-1]))
    return held
