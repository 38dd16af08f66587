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
from megatron_balance.planner.problem import Problem

MIN_SAMPLES = 16384
"""Samples of a part at least. Parts of a quarter of that were given numbers of micro-batches that cost 5 % more."""

MIN_GROUPS = 32
"""Groups of ranks that meet in a part at least, or ranks that do not: with four of 64 ranks plans cost 2 % more."""

PARTS = (32, 16, 8, 4, 2)


def num_parts(problem: Problem) -> int:
    """Parts in which a batch is planned; 1 where it is too small for several."""
    dp_size, span = problem.topology.dp_size, problem.sync_group_size
    for parts in PARTS:
        whole = dp_size % (parts * span) == 0 and dp_size // (parts * span) >= MIN_GROUPS
        if whole and problem.num_samples >= parts * MIN_SAMPLES:
            return parts
    return 1


def part_of(problem: Problem, *, parts: int) -> Problem:
    """The problem of one part, with one sample for each stratum. `problem`: by falling cost."""
    starts = np.arange(0, problem.num_samples, parts)
    return replace(
        problem,
        costs=np.maximum.reduceat(problem.costs, starts),
        shared_costs=np.maximum.reduceat(problem.shared_costs, starts),
        weights=np.maximum.reduceat(problem.weights, starts),
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
