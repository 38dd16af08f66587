"""Which micro-batch of which rank runs each sample: from a planning problem to slot numbers.

Two ways lead there. Level packing treats the micro-batches of all ranks as one set of bins. The
algorithms by name give samples to ranks first, then pack each rank by itself; so does a plan in which
samples may not leave the rank that loaded them. `placement_by_level.py` and `placement_by_rank.py` hold the two.

    1. num_microbatches starts at the least that could hold the samples
    2. pack; where that breaks the cap, raise num_microbatches by microbatch_multiple and pack again
       (and again by other targets, where groups of ranks that meet end uneven)
    3. fill empty slots (`empty_slots.py`)
    4. refine small batches
    5. put the slots of each rank in order
    6. evaluate a few larger num_microbatches as well, keep the least predicted cost

Under `pipeline` the counts of step 6 reach further, with targets of several slopes (`pipeline_search.py`), and the
plans of the algorithms by name are looked at as well: a makespan follows no sum that level packing could aim at.

Rule of the file: `slot_of` is `[num_samples]` `rank * num_microbatches + slot`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from megatron_balance.planner.bounds.time import lower_bound, min_num_microbatches
from megatron_balance.planner.packing.by_level import place_by_levels
from megatron_balance.planner.packing.by_rank import assign_ranks, place_by_ranks
from megatron_balance.planner.packing.pipeline_search import search_pipeline
from megatron_balance.planner.packing.slot_layout import Placement
from megatron_balance.planner.problem import Problem, restrict

NUM_CANDIDATES = 3
"""Values of num_microbatches that are tried, from the least feasible one."""

MAX_CANDIDATES = 9
"""Values that are tried where the plan is still poor: large samples that fill a rank leave too little room
for the others, and more micro-batches make it. After the first ones they grow by a tenth."""

GOOD_ENOUGH = 1024
"""A plan within one part in this many of its lower bound ends the search."""

STILL_POOR = 512
"""A plan further than one part in this many from its bound is worth more than `NUM_CANDIDATES`."""

MAX_DIFFERENCED_SAMPLES = 2048
"""Largest differencing takes ten times as long as level packing: it is tried on batches of so many samples."""

NAMED = ("first_fit", "greedy", "karmarkar_karp")
"""Under `pipeline` their plans are compared with, on batches of so many samples."""

DIFFERENCED = 16384
"""A plan of few samples further than one part in this many from its bound is compared with largest differencing."""


def place(problem: Problem, *, algorithm: str, home_ranks: NDArray[np.int64] | None = None) -> Placement:
    """Places every sample of the global batch.

    Args:
        problem: the global batch.
        algorithm: a name in `partition.ALGORITHMS`.
        home_ranks: `[num_samples]` rank that each sample must stay on; None where samples may move.

    Raises:
        BalanceError: the costs leave int64.
    """
    if algorithm != "level_packing":
        return _search(problem, algorithm=algorithm, home_ranks=home_ranks)
    in_own_order = home_ranks is None
    # In an order of their own, so that the order of arrival changes no cost.
    order = np.lexsort((-problem.shared_costs, -problem.weights, -problem.costs))
    ordered = restrict(problem, order, topology=problem.topology) if in_own_order else problem
    if problem.objective == "pipeline" and problem.sync_span == 1:
        found = _search_pipeline(ordered, home_ranks=home_ranks)
    else:
        found = _search(ordered, algorithm=algorithm, home_ranks=home_ranks)
    if in_own_order:
        slot_of = np.empty_like(found.slot_of)
        slot_of[order] = found.slot_of
        found = replace(found, slot_of=slot_of)
    if problem.objective == "pipeline" and problem.num_samples <= MAX_DIFFERENCED_SAMPLES:
        for name in NAMED:
            by_name = _search(problem, algorithm=name, home_ranks=home_ranks)
            if by_name.predicted_cost < found.predicted_cost:
                found = by_name
    return found


def _search_pipeline(problem: Problem, *, home_ranks: NDArray[np.int64] | None) -> Placement:
    """Level packing for a pipeline: of all ranks, or of each at home."""
    bound = lower_bound(problem)
    samples_of = None if home_ranks is None else _samples_of(problem, home_ranks)

    def pack(num_microbatches: int, steepness: int) -> Placement:
        if samples_of is None:
            return place_by_levels(problem, num_microbatches=num_microbatches, bound=bound, steepness=steepness)
        return place_by_ranks(
            problem,
            algorithm="level_packing",
            samples_of=samples_of,
            move_samples=False,
            num_microbatches=num_microbatches,
            steepness=steepness,
        )

    return replace(search_pipeline(problem, bound=bound, pack=pack), lower_bound=bound)


def _samples_of(problem: Problem, home_ranks: NDArray[np.int64]) -> list[list[int]]:
    """Sample ids of every rank."""
    return [np.flatnonzero(home_ranks == rank).tolist() for rank in range(problem.topology.dp_size)]


def _search(problem: Problem, *, algorithm: str, home_ranks: NDArray[np.int64] | None) -> Placement:
    """Placements with rising num_microbatches; the best of them."""
    bound = lower_bound(problem)
    multiple = problem.topology.microbatch_multiple
    num_microbatches = fewest = min_num_microbatches(problem)
    samples_of: list[list[int]] | None = None
    if home_ranks is not None:
        samples_of = _samples_of(problem, home_ranks)
    elif algorithm != "level_packing":
        samples_of = assign_ranks(problem, algorithm=algorithm)
    at_home = 0 if home_ranks is None else _largest_at_home(problem, home_ranks)
    best: Placement | None = None
    for candidate in range(MAX_CANDIDATES):
        if samples_of is None:
            found = place_by_levels(problem, num_microbatches=num_microbatches, bound=bound)
        else:
            found = place_by_ranks(
                problem,
                algorithm=algorithm,
                samples_of=samples_of,
                move_samples=home_ranks is None,
                num_microbatches=num_microbatches,
            )
        if best is None or found.predicted_cost < best.predicted_cost:
            best = found
        excess = best.predicted_cost - bound
        # At home, more micro-batches change nothing but what they cost besides.
        home_bound = at_home + best.num_microbatches * problem.per_microbatch if at_home else 0
        if excess <= bound // GOOD_ENOUGH or best.predicted_cost <= home_bound:
            break
        stride = multiple
        if candidate + 1 >= NUM_CANDIDATES:
            # A pipeline is above its bound by its bubble, which more micro-batches shrink without end.
            if samples_of is not None or problem.in_pipeline or excess <= bound // STILL_POOR:
                break
            stride = -(-found.num_microbatches // (10 * multiple)) * multiple
        # More slots than samples would only add dummies.
        most = problem.num_samples // (problem.topology.dp_size * multiple) * multiple
        num_microbatches = min(found.num_microbatches + stride, most)
        # One that is no better than the best even at its bound is not worth a look.
        dearer = bound + (num_microbatches - fewest) * problem.per_microbatch >= best.predicted_cost
        if dearer or num_microbatches <= found.num_microbatches:
            break
    assert best is not None
    for name in _names_worth_trying(problem, best, bound=bound) if samples_of is None else ():
        by_name = place_by_ranks(
            problem,
            algorithm=name,
            samples_of=assign_ranks(problem, algorithm=name),
            move_samples=True,
            num_microbatches=best.num_microbatches,
        )
        if by_name.predicted_cost < best.predicted_cost:
            best = by_name
    return replace(best, lower_bound=bound)


def _largest_at_home(problem: Problem, home_ranks: NDArray[np.int64]) -> int:
    """The costliest rank's samples where they were loaded; 0 where the time is more than sums of ranks."""
    if problem.sync_span > 1 or problem.in_pipeline or problem.shared_costs.any():
        return 0
    loads = np.zeros(problem.topology.dp_size, dtype=np.int64)
    np.add.at(loads, home_ranks, problem.costs)
    return int(loads.max())


def _names_worth_trying(problem: Problem, best: Placement, *, bound: int) -> tuple[str, ...]:
    """Algorithms over the ranks to compare with: largest differencing is the best for few samples, and slow."""
    few = problem.num_samples <= MAX_DIFFERENCED_SAMPLES
    all_meet = problem.sync_span == problem.topology.dp_size > 1
    if not few or all_meet or best.predicted_cost - bound <= bound // DIFFERENCED:
        return ()
    # Where several groups meet, either was ahead of level packing now and then.
    return ("karmarkar_karp",) if problem.sync_span == 1 else ("karmarkar_karp", "greedy")
