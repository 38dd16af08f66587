"""Searches the number of micro-batches of a pipeline, and how uneven they are.

Of M even micro-batches of a rank's work W, each of which costs c besides, a pipeline of p stages makes

    (W/M + c) * (M + p - 1) / p

which is least at M = sqrt(W * (p-1) / c): before, the bubble costs more than more micro-batches do, and behind less.
Uneven ones in the order of a mountain fill and drain the pipeline with less work, which takes a quarter or more off
the bubble. How uneven is best depends on how many there are to a stage, and what samples and the cap allow is not
known before it is tried. So a few counts up to the best one are tried, each with a few slopes.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt

from megatron_balance.planner.bounds.time import min_num_microbatches
from megatron_balance.planner.packing.slot_layout import Placement
from megatron_balance.planner.problem import Problem

MAX_TIMES_FEWEST = 4
"""Micro-batches beyond the fewest that are tried where they cost nothing besides: with a cost that is free of launches
nothing else would end it."""

MAX_LOST = 2
"""Counts in a row that were no better than the best before the search ends."""


def search_pipeline(problem: Problem, *, bound: int, pack: Callable[[int, int], Placement]) -> Placement:
    """The least predicted cost over counts and slopes; the fewest micro-batches of those.

    Args:
        problem: the global batch, whose time is a makespan.
        bound: no plan costs less.
        pack: packs into (num_microbatches, or more where it takes more; steepness).
    """
    fewest = min_num_microbatches(problem)
    best: Placement | None = None
    lost = reached = 0
    for num_microbatches in _counts(problem, fewest=fewest):
        if num_microbatches <= reached:
            continue
        if best is not None and _least_cost(problem, num_microbatches=num_microbatches) >= best.predicted_cost:
            break
        lost += 1
        for steepness in problem.objective.slopes if problem.sync_group_size == 1 else (0,):
            found = pack(num_microbatches, steepness)
            # Where the cap asked for more, the counts between were tried.
            reached = max(reached, found.num_microbatches)
            if best is None or found.predicted_cost < best.predicted_cost:
                best, lost = found, 0
        assert best is not None
        if best.predicted_cost <= bound or lost == MAX_LOST:
            break
    assert best is not None
    return best


def _counts(problem: Problem, *, fewest: int) -> list[int]:
    """Rising values of num_microbatches: the fewest and the next, then each half as many again, and the best."""
    topology = problem.topology
    multiple = topology.microbatch_multiple
    work = -(-int(problem.costs.sum()) // topology.dp_size)
    most = MAX_TIMES_FEWEST * fewest
    if problem.per_microbatch:
        most = isqrt(work * (topology.pp_size - 1) // (problem.per_microbatch * topology.vpp_size)) + 1
    # More slots than samples would only add dummies.
    most = min(most, problem.num_samples // topology.dp_size) // multiple * multiple
    counts = [fewest, fewest + multiple]
    while counts[-1] < most:
        counts.append(min(max(-(-counts[-1] * 3 // (2 * multiple)) * multiple, counts[-1] + multiple), most))
    return counts


def _least_cost(problem: Problem, *, num_microbatches: int) -> int:
    """No plan with this number of micro-batches costs less: its work in a stage, and the ends where a stage idles."""
    topology = problem.topology
    work = -(-int(problem.costs.sum()) // topology.dp_size) + num_microbatches * problem.per_microbatch
    idle = (topology.pp_size - 1) * problem.per_microbatch
    return (work * topology.vpp_size + idle) // (topology.pp_size * topology.vpp_size)
