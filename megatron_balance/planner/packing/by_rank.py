"""Samples to ranks first, then each rank packed by itself: the algorithms by name, and samples that stay home."""

from __future__ import annotations

import numpy as np

from megatron_balance.planner.bounds.time import min_num_microbatches
from megatron_balance.planner.packing.empty_slots import fill_empty
from megatron_balance.planner.packing.rank_levels import pack_ranks
from megatron_balance.planner.packing.slot_layout import Placement, in_order
from megatron_balance.planner.partition import first_fit, greedy, karmarkar_karp
from megatron_balance.planner.problem import Problem, restrict
from megatron_balance.topology import Topology

MAX_STRICT_ATTEMPTS = 8
"""Packings by name that may break the cap before first fit decreasing, which cannot, takes over."""


def place_by_ranks(
    problem: Problem,
    *,
    algorithm: str,
    samples_of: list[list[int]],
    move_samples: bool,
    num_microbatches: int,
    steepness: int = 0,
) -> Placement:
    """Every rank by itself, with the same number of micro-batches.

    Args:
        problem: the global batch.
        algorithm: packs the samples of a rank.
        samples_of: for each rank, its samples.
        move_samples: True if a rank without samples for all its micro-batches may take other ranks'.
        num_microbatches: of every rank; more where it takes more.
        steepness: of the targets of level packing (`rank_levels.py`).
    """
    dp_size, multiple = problem.topology.dp_size, problem.topology.microbatch_multiple
    alone = Topology(1, microbatch_multiple=multiple)
    problems = [restrict(problem, np.array(ids, dtype=np.int64), topology=alone) for ids in samples_of]
    fewest = max(num_microbatches, *(min_num_microbatches(local) for local in problems))
    num_microbatches = fewest

    attempts = 0
    while True:
        strict = attempts >= MAX_STRICT_ATTEMPTS
        bins_of: list[list[list[int]]] = []
        for local in problems:
            bins = _pack_rank(
                local, algorithm=algorithm, num_microbatches=num_microbatches, strict=strict, steepness=steepness
            )
            if not _fits(local, bins):
                break
            bins_of.append(bins)
        most = max((len(bins) for bins in bins_of), default=0)
        if len(bins_of) == dp_size and most <= num_microbatches:
            break
        attempts += 1
        if len(bins_of) == dp_size:
            num_microbatches = -(-most // multiple) * multiple
        else:
            num_microbatches = num_microbatches + multiple if attempts < MAX_STRICT_ATTEMPTS else fewest

    slot_of = np.empty(problem.num_samples, dtype=np.int64)
    for rank, (bins, ids) in enumerate(zip(bins_of, samples_of, strict=True)):
        for slot, items in enumerate(items for items in bins if items):
            slot_of[[ids[item] for item in items]] = rank * num_microbatches + slot
    slot_of = fill_empty(problem, slot_of, num_parts=dp_size, bins_per_part=num_microbatches, across=move_samples)
    return in_order(problem, slot_of, num_microbatches=num_microbatches)


def assign_ranks(problem: Problem, *, algorithm: str) -> list[list[int]]:
    """Sample ids of every rank, by the cost of a sample; the same number each where samples are counted."""
    dp_size = problem.topology.dp_size
    costs = problem.costs + problem.shared_costs
    if algorithm == "greedy":
        most = -(-problem.num_samples // dp_size) if problem.counts_samples else None
        return greedy(costs, num_parts=dp_size, max_count=most)
    return karmarkar_karp(costs, num_parts=dp_size, equal_size=problem.counts_samples)


def _pack_rank(
    problem: Problem, *, algorithm: str, num_microbatches: int, strict: bool, steepness: int
) -> list[list[int]]:
    """The micro-batches of one rank; some may be empty, or over the cap unless `strict`."""
    counted = problem.counts_samples
    if algorithm == "first_fit" or strict:
        return first_fit(problem.weights, capacity=problem.capacity, decreasing=strict)
    if algorithm == "karmarkar_karp":
        return karmarkar_karp(problem.costs, num_parts=num_microbatches, equal_size=counted)
    if algorithm == "greedy":
        return greedy(problem.costs, num_parts=num_microbatches, max_count=problem.capacity if counted else None)
    bin_of, num_bins = pack_ranks(problem, num_microbatches=num_microbatches, steepness=steepness)
    return [np.flatnonzero(bin_of == index).tolist() for index in range(num_bins)]


def _fits(problem: Problem, bins: list[list[int]]) -> bool:
    """True where no bin of two samples or more is over the cap."""
    weights = problem.weights.tolist()
    return all(len(items) < 2 or sum(weights[item] for item in items) <= problem.capacity for items in bins)
