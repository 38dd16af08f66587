"""Lower bounds: a time that no plan of this global batch can beat, however it moves the samples.

Every bound is sound (never above the best possible plan) and says nothing about being reached. All
arithmetic is on integers; where a fraction has to be rounded, it is rounded to the safe side.

    step        the mean over ranks; the largest sample; and by the pigeonhole principle, among the k*D+1
                costliest samples some rank holds k+1 of them
    microbatch  for every i: sorted by height, the first i slots are at least as high as the samples that
                cannot share a micro-batch force them to be, and what the first i slots cannot hold is
                spread evenly over the rest
    pipeline    the work of a stage, plus the ends where it idles; one micro-batch through all stages
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from megatron_balance.planner.problem import Problem


@dataclass(frozen=True)
class SlotFloor:
    """What bounds the slots of ranks that meet in every micro-batch.

    Attributes:
        forced_heights: `[num_forced]` falling: the i-th highest slot costs at least this, because of
            large samples that cannot share a micro-batch.
        held_costs: `[num_forced + 1]`: the most that the first i slots of all ranks that meet can hold.
        num_high: slots at the front that the bound takes as forced; the rest is even.
        spread_cost: cost that the first `num_high` slots of all ranks cannot hold.
        total_cost: the bound times `dp_size`.
    """

    forced_heights: tuple[int, ...]
    held_costs: tuple[int, ...]
    num_high: int
    spread_cost: int
    total_cost: int


def min_num_microbatches(problem: Problem) -> int:
    """Micro-batches that every rank needs at least, a multiple of `microbatch_multiple`."""
    large = 2 * problem.weights > problem.capacity
    filled = int(np.minimum(problem.weights, problem.capacity).sum())
    num_bins = max(-(-filled // problem.capacity), int(large.sum()), 1)
    multiple = problem.topology.microbatch_multiple
    return -(-num_bins // (problem.topology.dp_size * multiple)) * multiple


def slot_floor(problem: Problem, *, sync_span: int) -> SlotFloor:
    """Bounds the mean over groups of the sum over slots of the costliest rank's own cost.

    With e = `sync_span`, T the capacity, B[i] the (i*e+1)-th costliest of the samples heavier than T/2 (no
    two of which share a micro-batch), C the total cost and U(i) the most that i slots of e ranks can hold,
    a fractional knapsack of i*e*T, the bound is max over i of `sum(B[:i]) + (C - U(i)) / e` over all
    groups together.

    Args:
        problem: the global batch.
        sync_span: ranks that meet in every micro-batch.

    Returns:
        SlotFloor: the best i, and what it says.
    """
    large = np.sort(problem.costs[2 * problem.weights > problem.capacity])[::-1]
    forced = large[::sync_span].tolist()
    total = int(problem.costs.sum())
    capacities = [num_high * sync_span * problem.capacity for num_high in range(len(forced) + 1)]
    held = _most_cost_within(problem, capacities)
    values = [
        sync_span * forced_cost + total - kept
        for forced_cost, kept in zip(accumulate(forced, initial=0), held, strict=True)
    ]
    num_high = max(range(len(values)), key=lambda i: (values[i], -i))
    return SlotFloor(
        forced_heights=tuple(forced),
        held_costs=tuple(held),
        num_high=num_high,
        spread_cost=total - held[num_high],
        total_cost=values[num_high],
    )


def lower_bound(problem: Problem) -> int:
    """Lower bound on the objective's value over all plans that may move samples.

    Returns:
        Cost, in the units of the problem.
    """
    dp_size, span = problem.topology.dp_size, problem.topology.ep_span
    own, shared = int(problem.costs.sum()), int(problem.shared_costs.sum())
    overhead = min_num_microbatches(problem) * problem.per_microbatch
    # A sample runs whole on one rank, and its shared part is split over the expert-parallel group.
    single = int((problem.costs + -(-problem.shared_costs // span)).max(initial=0))
    if problem.objective == "microbatch":
        spread = slot_floor(problem, sync_span=problem.sync_span).total_cost
        return max(-(-(spread + shared) // dp_size), single) + overhead
    step = max(-(-(own + shared) // dp_size), single, _pigeonhole(problem.costs, num_parts=dp_size)) + overhead
    if problem.objective == "step":
        return step
    pp_size, vpp_size = problem.topology.pp_size, problem.topology.vpp_size
    # A stage works step/p; at both ends it idles for at least an empty micro-batch on the other stages.
    idle = (pp_size - 1) * problem.per_microbatch
    in_stages = -(-(step * vpp_size + idle) // (pp_size * vpp_size))
    return max(in_stages, single + problem.per_microbatch)


def single_sample_floor(problem: Problem) -> float:
    """The largest sample over a rank's even share of the total cost, at least 1.0.

    No plan brings max over mean below it: the rank of that sample ends last, whatever else moves.
    """
    total = int(problem.costs.sum())
    largest = int(problem.costs.max(initial=0))
    return max(1.0, largest * problem.topology.dp_size / total) if total else 1.0


def _pigeonhole(costs: NDArray[np.int64], *, num_parts: int) -> int:
    """Max over k of the k+1 smallest of the k*num_parts + 1 costliest: some part holds k+1 of these."""
    falling = np.sort(costs)[::-1]
    sums = np.concatenate([[0], np.cumsum(falling)])
    ends = np.arange(num_parts + 1, costs.size + 1, num_parts)
    held = np.arange(2, ends.size + 2)
    return int((sums[ends] - sums[ends - held]).max(initial=0))


def _most_cost_within(problem: Problem, capacities: list[int]) -> list[int]:
    """The most cost that so much room can hold, samples cut at will: a fractional knapsack.

    An over-long sample takes one micro-batch, so it counts as `capacity` and never more.

    Args:
        problem: the global batch.
        capacities: `[num_queries]` room, tokens or samples.

    Returns:
        `[num_queries]` costs, rounded up.
    """
    weights = np.minimum(problem.weights, problem.capacity)
    # By falling cost a token. What weighs nothing comes first.
    densities = np.where(weights > 0, problem.costs / np.maximum(weights, 1), np.inf)
    order = np.argsort(-densities, kind="stable")
    sorted_costs, sorted_weights = problem.costs[order], weights[order]
    cost_sums, weight_sums = np.cumsum(sorted_costs), np.cumsum(sorted_weights)
    held: list[int] = []
    for room in capacities:
        index = int(np.searchsorted(weight_sums, room, side="right"))
        cost = int(cost_sums[index - 1]) if index else 0
        if index < order.size:
            free = room - (int(weight_sums[index - 1]) if index else 0)
            cost += -(-free * int(sorted_costs[index]) // int(sorted_weights[index]))
            # Densities are rounded, so that neighbours may stand in the wrong order by one part in 2**52.
            cost += (cost >> 48) + 1
        held.append(min(cost, int(cost_sums[-1])) if order.size else 0)
    return held
