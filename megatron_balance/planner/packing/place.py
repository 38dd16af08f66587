"""Places every sample of a planning problem in a micro-batch of a rank, in ten steps.

    1. samples are sorted by cost, so that the order of arrival has no effect
    2. the objective says which ranks wait for one another in every micro-batch: none, a group of ranks, or all
    3. the number of micro-batches starts at the least that may hold the samples, and the next two are tried as well;
       for a pipeline, rising counts until two in a row are no better (`search.py`)
    4. ranks that do not meet: samples go, costliest first, to the least loaded rank, there to the micro-batch
       furthest below its target (`rank_levels.py`)
    5. groups that meet: rows that a large sample makes high are packed first and full, each micro-batch with the
       costliest samples that fit; in a pipeline bare ones are tried as well (`group_levels.py`)
    6. high rows are assigned to groups, the longest to the group with the least time
    7. the remaining time is distributed over the other rows so that groups end together, and the remaining samples go,
       costliest first, to the micro-batch furthest below its target
    8. the time of a group above the mean is subtracted from its targets, and step 7 is repeated, at most three times;
       if the mean itself is too high, step 5 is repeated with higher rows
    9. an empty micro-batch takes a sample from elsewhere (`empty_slots.py`), and batches of up to 1,024 samples are
       refined by moves and swaps that relieve the slowest group (`partition/refine.py`)
    10. the plan of least predicted time is kept; small batches of ranks that do not meet are compared with plans of the
        algorithms by name

Where ranks meet between a vision encoder and the language model, the samples of a slot are then exchanged between its
ranks, so that both parts are even (`even_parts.py`).

A large batch is planned as copies of one part's plan (`copies.py`).

An algorithm by name gives samples to ranks first and then packs each rank by itself (`by_rank.py`), and so does a plan
whose samples may not leave their rank. `slot_of` is `[num_samples]` `rank * num_microbatches + slot`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from megatron_balance.planner.bounds.time import least_time, min_num_microbatches
from megatron_balance.planner.packing.by_rank import assign_ranks, place_by_ranks
from megatron_balance.planner.packing.copies import copied, num_parts, part_of
from megatron_balance.planner.packing.even_parts import even_parts
from megatron_balance.planner.packing.group_levels import place_groups
from megatron_balance.planner.packing.rank_levels import place_ranks
from megatron_balance.planner.packing.search import search
from megatron_balance.planner.packing.slot_layout import Placement
from megatron_balance.planner.problem import Problem, restrict
from megatron_balance.planner.timing import Sum

MAX_NAMED_SAMPLES = 2048
"""Samples up to which algorithms by name are tried: they take ten times as long, and are better on few samples only."""

WORTH_TRIALS = 16384
"""A plan further than one part in this many from its bound is compared with algorithms by name."""


def place(problem: Problem, *, algorithm: str, home_ranks: NDArray[np.int64] | None = None) -> Placement:
    """Places every sample of the global batch.

    Args:
        problem: the global batch.
        algorithm: a name in `partition.ALGORITHMS`.
        home_ranks: `[num_samples]` rank that each sample must stay on; None where samples may move.

    Raises:
        BalanceError: the costs leave int64.
    """
    work = problem.objective.least_work(problem)
    bound = least_time(problem, work=work, num_microbatches=min_num_microbatches(problem))
    by_levels = algorithm == "level_packing"
    if by_levels and home_ranks is None:
        # In an order of their own, so that the order of arrival changes no cost.
        order = problem.kinds.order()
        ordered = restrict(problem, order, topology=problem.topology)
        found = _place_by_levels(ordered, bound=bound, work=work)
        slot_of = np.empty_like(found.slot_of)
        slot_of[order] = found.slot_of
        found = replace(found, slot_of=slot_of)
    else:
        found = _place_by_ranks(problem, algorithm=algorithm, home_ranks=home_ranks, bound=bound, work=work)
    if by_levels and problem.num_samples <= MAX_NAMED_SAMPLES and not problem.level:
        for name in problem.objective.trials:
            if found.predicted_cost > bound + bound // WORTH_TRIALS:
                by_name = _place_by_ranks(problem, algorithm=name, home_ranks=home_ranks, bound=bound, work=work)
                found = min(found, by_name, key=lambda placement: placement.predicted_cost)
    if problem.image_costs is not None and by_levels and home_ranks is None and not problem.level:
        found = even_parts(problem, found)
    return replace(found, lower_bound=bound)


def _place_by_levels(problem: Problem, *, bound: int, work: int) -> Placement:
    """The micro-batches of all ranks together."""
    parts = num_parts(problem)
    if parts > 1:
        part = part_of(problem, parts=parts)
        part_work = part.objective.least_work(part)
        part_bound = least_time(part, work=part_work, num_microbatches=min_num_microbatches(part))
        return copied(problem, _place_by_levels(part, bound=part_bound, work=part_work), parts=parts)
    packs = _ways(problem, work=work)
    return search(problem, timing=problem.timing, bound=bound, work=work, packs=packs)


def _ways(problem: Problem, *, work: int) -> list[Callable[[int], Placement | None]]:
    """The ways to pack that `search` tries."""
    if problem.sync_group_size > 1:
        # A single group computes all expert work, in whichever rows it lies.
        alone = problem.sync_group_size == problem.topology.dp_size
        return [
            lambda num, fill=fill: place_groups(problem, num_microbatches=num, work=work, fill=fill)
            for fill in ((True,) if alone else problem.timing.fills)
        ]
    return [
        lambda num, steepness=steepness: place_ranks(problem, num_microbatches=num, work=work, steepness=steepness)
        for steepness in problem.timing.slopes
    ]


def _place_by_ranks(
    problem: Problem, *, algorithm: str, home_ranks: NDArray[np.int64] | None, bound: int, work: int
) -> Placement:
    """Packs each rank separately, with the samples that it loaded or that the algorithm assigns to it."""
    if home_ranks is None:
        samples_of = assign_ranks(problem, algorithm=algorithm)
    else:
        samples_of = [np.flatnonzero(home_ranks == rank).tolist() for rank in range(problem.topology.dp_size)]
        # The work of a rank is that of the samples it loaded, for any number of micro-batches.
        work = max(work, *(int(problem.costs[ids].sum()) for ids in samples_of))
    # Only level packing aims at targets; by name, more micro-batches are tried where the cap may ask for them.
    timing = problem.timing if algorithm == "level_packing" else Sum()

    packs: list[Callable[[int], Placement | None]] = [
        lambda num, steepness=steepness: place_by_ranks(
            problem,
            algorithm=algorithm,
            samples_of=samples_of,
            move_samples=home_ranks is None,
            num_microbatches=num,
            steepness=steepness,
        )
        for steepness in (timing.slopes if problem.sync_group_size == 1 else (0,))
    ]
    return search(problem, timing=timing, bound=bound, work=work, packs=packs)
