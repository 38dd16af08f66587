"""Plans a large batch as copies of one part's plan.

With hundreds of ranks, the samples by cost taken k at a time are nearly equal, and every k-th sample has the lengths of
all. So a part of the ranks is planned with one sample for each k, and k parts run that plan.

    1. samples by falling cost are cut into strata of k
    2. a stratum is planned as one sample with the largest cost and weight of its own, on 1/k of the ranks
    3. each of the k parts of the ranks gets one sample of every stratum, in turns from the one end and the other

A micro-batch of a part holds no more than the planned one, so the cap holds. A part takes longer than the mean of parts
by the cost of one large sample at most, since what strata differ by sums up to the costliest sample.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from megatron_balance.planner.packing.empty_slots import fill_empty
from megatron_balance.planner.packing.slot_layout import Placement, in_order
from megatron_balance.planner.problem import SMALLER_PARTS, Problem

MIN_SAMPLES = 16384
"""Samples of a part at least. Parts of a quarter of that were given numbers of micro-batches that cost 5 % more."""

MIN_GROUPS = 32
"""Groups of ranks that meet in a part at least, or ranks that do not: with four of 64 ranks plans cost 2 % more."""

MAX_PIPELINE_SAMPLES = 65536
"""Parts of a pipeline with more samples are cut further, down to half of `MIN_GROUPS`: they are searched longest, and
that their plans lose nothing by it was measured at this size. Without a pipeline plans would cost 0.2 % more."""

TOTAL_BITS = 44
"""Bits of the sum of a part's costs, which are rounded up to that: loads of micro-batches then sort in a fifth of the
time (`sorting.py`)."""


def num_parts(problem: Problem) -> int:
    """Parts in which a batch is planned; 1 where it is too small for several."""
    num_groups, num_samples = problem.topology.dp_size // problem.sync_group_size, problem.num_samples
    # A cheaper plan may use parts of a quarter.
    smaller = 4 if problem.level >= SMALLER_PARTS else 1
    most = num_groups * smaller // MIN_GROUPS
    if problem.objective.is_makespan(problem.topology):
        most = max(most, min(-(-num_samples // MAX_PIPELINE_SAMPLES), 2 * num_groups // MIN_GROUPS))
    most = min(most, num_samples * smaller // MIN_SAMPLES)
    return max((parts for parts in range(1, most + 1) if num_groups % parts == 0), default=1)


def part_of(problem: Problem, *, parts: int) -> Problem:
    """The problem of one part, with one sample for each stratum. `problem`: by falling cost."""
    starts = np.arange(0, problem.num_samples, parts)
    total = int(problem.costs[starts].sum()) + int(problem.shared_costs[starts].sum())
    shift = max(0, total.bit_length() - TOTAL_BITS)

    def of_strata(costs: NDArray[np.int64]) -> NDArray[np.int64]:
        return -(-np.maximum.reduceat(costs, starts) >> shift)

    return replace(
        problem,
        costs=of_strata(problem.costs),
        shared_costs=of_strata(problem.shared_costs),
        per_microbatch=-(-problem.per_microbatch >> shift),
        cost_shift=problem.cost_shift + shift,
        weights=np.maximum.reduceat(problem.weights, starts),
        image_costs=None,  # samples of a stratum may differ in it
        topology=replace(problem.topology, dp_size=problem.topology.dp_size // parts),
    )


def copied(problem: Problem, found: Placement, *, parts: int) -> Placement:
    """The placement of the whole batch, every part like `found`."""
    dp_size, num_microbatches = problem.topology.dp_size, found.num_microbatches
    stratum, place = np.divmod(np.arange(problem.num_samples), parts)
    part: NDArray[np.int64] = np.where(stratum % 2 == 0, place, parts - 1 - place)
    slot_of = part * (dp_size // parts * num_microbatches) + found.slot_of[stratum]
    # The last stratum may lack samples.
    span = problem.sync_group_size
    slot_of = fill_empty(
        problem, slot_of, num_parts=dp_size // span, bins_per_part=num_microbatches * span, across=True
    )
    return in_order(problem, slot_of, num_microbatches=num_microbatches)
