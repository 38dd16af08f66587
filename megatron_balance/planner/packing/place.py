"""Places every sample in a micro-batch of a rank: from a planning problem to slot numbers, in ten lines.

    1. samples are sorted by cost, so that the order of arrival changes nothing
    2. the objective says which ranks wait for one another in every micro-batch: none, a group of ranks, or all
    3. the number of micro-batches starts at the least that could hold the samples, and the next two are tried as well;
       for a pipeline, rising counts until two in a row are no better (`pipeline_search.py`)
    4. ranks that do not meet: samples go, costliest first, to the least loaded rank, there to the micro-batch
       furthest below its target (`rank_levels.py`)
    5. groups that meet: rows that a large sample makes high are packed first and full, each micro-batch with the
       costliest samples that fit (`group_levels.py`)
    6. high rows are given to the groups, the longest to the group with the least time
    7. the time left is poured over the other rows like water, and the samples left go, costliest first, to the
       micro-batch furthest below its target
    8. what a group takes above the mean is taken off its targets, and step 7 is done again, three times at most
    9. an empty micro-batch takes a sample from elsewhere (`empty_slots.py`), and batches of up to 1,024 samples are
       refined by moves and swaps that relieve the slowest group (`partition/refine.py`)
    10. the plan of least predicted time is kept; small batches of ranks that do not meet are compared with plans of the
        algorithms by name

An algorithm by name gives samples to ranks first and then packs each rank by itself (`by_rank.py`), and so does a plan
whose samples may not leave their rank. `slot_of` is `[num_samples]` `rank * num_microbatches + slot`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from megatron_balance.planner.bounds.time import min_num_microbatches
from megatron_balance.planner.packing.by_rank import assign_ranks, place_by_ranks
from megatron_balance.planner.packing.group_levels import place_groups
from megatron_balance.planner.packing.pipeline_search import search_pipeline
from megatron_balance.planner.packing.rank_levels import place_ranks
from megatron_balance.planner.packing.slot_layout import Placement
from megatron_balance.planner.problem import Problem, restrict

NUM_CANDIDATES = 3
"""Values of num_microbatches that are tried, from the least feasible one."""

GOOD_ENOUGH = 1024
"""A plan within one part in this many of its lower bound ends the search."""

MAX_NAMED_SAMPLES = 2048
"""Samples up to which algorithms by name are tried: they take ten times as long, and are better on few samples only."""

WORTH_TRIALS = 16384
"""A plan further than one part in this many from its bound is compared with algorithms by name."""

_Pack = Callable[[int, int], Placement]
"""Places with (num_microbatches, or more where it takes more; steepness of the targets)."""


def place(problem: Problem, *, algorithm: str, home_ranks: NDArray[np.int64] | None = None) -> Placement:
    """Places every sample of the global batch.

    Args:
        problem: the global batch.
        algorithm: a name in `partition.ALGORITHMS`.
        home_ranks: `[num_samples]` rank that each sample must stay on; None where samples may move.

    Raises:
        BalanceError: the costs leave int64.
    """
    if home_ranks is not None or algorithm != "level_packing":
        found = _place_by_ranks(problem, algorithm=algorithm, home_ranks=home_ranks)
    else:
        # In an order of their own, so that the order of arrival changes no cost.
        order = np.lexsort((-problem.shared_costs, -problem.weights, -problem.costs))
        ordered = _place_by_levels(restrict(problem, order, topology=problem.topology))
        slot_of = np.empty_like(ordered.slot_of)
        slot_of[order] = ordered.slot_of
        found = replace(ordered, slot_of=slot_of)
    if algorithm != "level_packing" or problem.num_samples > MAX_NAMED_SAMPLES:
        return found
    bound = found.lower_bound
    for name in problem.objective.trials:
        if found.predicted_cost > bound + bound // WORTH_TRIALS:
            by_name = _place_by_ranks(problem, algorithm=name, home_ranks=home_ranks)
            found = min(found, by_name, key=lambda placement: placement.predicted_cost)
    return found


def _place_by_levels(problem: Problem) -> Placement:
    """The micro-batches of all ranks together."""
    bound = problem.lower_bound()

    def pack(num_microbatches: int, steepness: int) -> Placement:
        if problem.sync_group_size > 1:
            return place_groups(problem, num_microbatches=num_microbatches, bound=bound)
        return place_ranks(problem, num_microbatches=num_microbatches, bound=bound, steepness=steepness)

    search = search_pipeline if problem.in_pipeline else _search
    return replace(search(problem, bound=bound, pack=pack), lower_bound=bound)


def _place_by_ranks(problem: Problem, *, algorithm: str, home_ranks: NDArray[np.int64] | None) -> Placement:
    """Each rank by itself, with the samples that it loaded or that the algorithm gives it."""
    bound = problem.lower_bound()
    if home_ranks is None:
        samples_of = assign_ranks(problem, algorithm=algorithm)
    else:
        samples_of = [np.flatnonzero(home_ranks == rank).tolist() for rank in range(problem.topology.dp_size)]

    def pack(num_microbatches: int, steepness: int) -> Placement:
        return place_by_ranks(
            problem,
            algorithm=algorithm,
            samples_of=samples_of,
            move_samples=home_ranks is None,
            num_microbatches=num_microbatches,
            steepness=steepness,
        )

    if algorithm == "level_packing" and problem.in_pipeline:
        return replace(search_pipeline(problem, bound=bound, pack=pack), lower_bound=bound)
    at_home = 0 if home_ranks is None else _largest_at_home(problem, home_ranks)
    return replace(_search(problem, bound=bound, pack=pack, at_home=at_home), lower_bound=bound)


def _search(problem: Problem, *, bound: int, pack: _Pack, at_home: int = 0) -> Placement:
    """Placements with rising num_microbatches; the best of them.

    Args:
        problem: the global batch.
        bound: no plan costs less.
        pack: places the samples.
        at_home: cost that no plan goes below because samples are bound to ranks, without `per_microbatch`.
    """
    multiple = problem.topology.microbatch_multiple
    num_microbatches = fewest = min_num_microbatches(problem)
    best: Placement | None = None
    for _ in range(NUM_CANDIDATES):
        found = pack(num_microbatches, 0)
        if best is None or found.predicted_cost < best.predicted_cost:
            best = found
        # At home, more micro-batches change nothing but what they cost besides.
        home_bound = at_home + best.num_microbatches * problem.per_microbatch if at_home else 0
        if best.predicted_cost <= max(bound + bound // GOOD_ENOUGH, home_bound):
            break
        # More slots than samples would only add dummies.
        most = problem.num_samples // (problem.topology.dp_size * multiple) * multiple
        num_microbatches = min(found.num_microbatches + multiple, most)
        # One that is no better than the best even at its bound is not worth a look.
        dearer = bound + (num_microbatches - fewest) * problem.per_microbatch >= best.predicted_cost
        if dearer or num_microbatches <= found.num_microbatches:
            break
    assert best is not None
    return best


def _largest_at_home(problem: Problem, home_ranks: NDArray[np.int64]) -> int:
    """The costliest rank's samples where they were loaded; 0 where the time is more than sums of ranks."""
    if problem.sync_group_size > 1 or problem.in_pipeline or problem.shared_costs.any():
        return 0
    loads = np.zeros(problem.topology.dp_size, dtype=np.int64)
    np.add.at(loads, home_ranks, problem.costs)
    return int(loads.max())
