"""Which micro-batch of which rank runs each sample: from a planning problem to slot numbers.

Two ways lead there. Level packing treats the micro-batches of all ranks as one set of bins. The
algorithms by name give samples to ranks first, then pack each rank by itself; so does a plan in which
samples may not leave the rank that loaded them.

    1. num_microbatches starts at the least that could hold the samples
    2. pack; where that breaks the cap, raise num_microbatches by microbatch_multiple and pack again
    3. fill empty slots (`empty_slots.py`)
    4. refine small batches
    5. put the slots of each rank in order
    6. evaluate a few larger num_microbatches as well, keep the least predicted cost

Rule of the file: `slot_of` is `[num_samples]` `rank * num_microbatches + slot`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron_balance.planner.bounds import lower_bound, min_num_microbatches
from megatron_balance.planner.empty_slots import fill_empty
from megatron_balance.planner.heights import target_heights
from megatron_balance.planner.partition import (
    first_fit,
    greedy,
    karmarkar_karp,
    karmarkar_karp_rows,
    level_packing,
    refine_parts,
    refine_rows,
)
from megatron_balance.planner.pipeline import mountain_order
from megatron_balance.planner.problem import Problem, check_total, restrict
from megatron_balance.planner.topology import Topology

MAX_REFINED_SAMPLES = 1024
"""Refining looks at pairs of samples; larger batches are within a fraction of a percent without it."""

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

DIFFERENCED = 16384
"""A plan of few samples further than one part in this many from its bound is compared with largest differencing."""

MAX_STRICT_ATTEMPTS = 8
"""Packings by name that may break the cap before first fit decreasing, which cannot, takes over."""


@dataclass(frozen=True)
class Placement:
    """Where every sample runs.

    Attributes:
        slot_of: `[num_samples]` int64, `rank * num_microbatches + slot`.
        num_microbatches: slots of every rank.
        cost_grid: `[dp_size, num_microbatches]` int64.
        predicted_cost: the objective's value.
        lower_bound: what no placement that moves samples at will can beat.
    """

    slot_of: NDArray[np.int64]
    num_microbatches: int
    cost_grid: NDArray[np.int64]
    predicted_cost: int
    lower_bound: int = 0


def place(problem: Problem, *, algorithm: str, home_ranks: NDArray[np.int64] | None = None) -> Placement:
    """Places every sample of the global batch.

    Args:
        problem: the global batch.
        algorithm: a name in `partition.ALGORITHMS`.
        home_ranks: `[num_samples]` rank that each sample must stay on; None where samples may move.

    Raises:
        BalanceError: the costs leave int64.
    """
    if home_ranks is None and algorithm == "level_packing":
        # In an order of their own, so that the order of arrival changes no cost.
        order = np.lexsort((-problem.shared_costs, -problem.weights, -problem.costs))
        found = _search(restrict(problem, order, topology=problem.topology), algorithm=algorithm, home_ranks=None)
        slot_of = np.empty_like(found.slot_of)
        slot_of[order] = found.slot_of
        return replace(found, slot_of=slot_of)
    return _search(problem, algorithm=algorithm, home_ranks=home_ranks)


def _search(problem: Problem, *, algorithm: str, home_ranks: NDArray[np.int64] | None) -> Placement:
    """Placements with rising num_microbatches; the best of them."""
    bound = lower_bound(problem)
    multiple = problem.topology.microbatch_multiple
    num_microbatches = fewest = min_num_microbatches(problem)
    samples_of: list[list[int]] | None = None
    if home_ranks is not None:
        samples_of = [np.flatnonzero(home_ranks == rank).tolist() for rank in range(problem.topology.dp_size)]
    elif algorithm != "level_packing":
        samples_of = _assign_ranks(problem, algorithm=algorithm)
    best: Placement | None = None
    for candidate in range(MAX_CANDIDATES):
        if samples_of is None:
            found = _place_by_levels(problem, num_microbatches=num_microbatches, bound=bound)
        else:
            found = _place_by_ranks(
                problem,
                algorithm=algorithm,
                samples_of=samples_of,
                move_samples=home_ranks is None,
                num_microbatches=num_microbatches,
            )
        if best is None or found.predicted_cost < best.predicted_cost:
            best = found
        excess = best.predicted_cost - bound
        if excess <= bound // GOOD_ENOUGH:
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
    if samples_of is None and _worth_differencing(problem, best, bound=bound):
        by_difference = _place_by_ranks(
            problem,
            algorithm="karmarkar_karp",
            samples_of=_assign_ranks(problem, algorithm="karmarkar_karp"),
            move_samples=True,
            num_microbatches=best.num_microbatches,
        )
        if by_difference.predicted_cost < best.predicted_cost:
            best = by_difference
    return replace(best, lower_bound=bound)


def _worth_differencing(problem: Problem, best: Placement, *, bound: int) -> bool:
    """Whether to try largest differencing over the ranks as well: it is the best for few samples, and slow."""
    few = problem.num_samples <= MAX_DIFFERENCED_SAMPLES and problem.sync_span == 1
    return few and best.predicted_cost - bound > bound // DIFFERENCED


def _place_by_levels(problem: Problem, *, num_microbatches: int, bound: int) -> Placement:
    """All micro-batches of all ranks as one set of bins."""
    dp_size, span = problem.topology.dp_size, problem.sync_span
    found: Placement | None = None
    bin_of = np.zeros(0, dtype=np.int64)
    for planned, way in _plannings(problem):
        packed, needed = _pack_levels(planned, num_microbatches=num_microbatches, bins_per_row=span, way=way)
        packed = fill_empty(planned, packed, num_parts=dp_size // span, bins_per_part=needed * span, across=True)
        placement = _lay_out(problem, packed, num_microbatches=needed)
        if found is None or placement.predicted_cost < found.predicted_cost:
            found, bin_of = placement, packed
    assert found is not None
    num_microbatches = found.num_microbatches
    if span == 1 and found.predicted_cost > bound:
        # The same micro-batches dealt to the ranks anew, as rows: often the ranks are more alike.
        dealt = _lay_out(problem, bin_of, num_microbatches=num_microbatches, span=dp_size)
        if dealt.predicted_cost < found.predicted_cost:
            found, bin_of = dealt, dealt.slot_of
    if problem.num_samples > MAX_REFINED_SAMPLES:
        return found
    overhead = num_microbatches * problem.per_microbatch
    if span == 1:
        refined = refine_parts(
            problem.costs,
            weights=problem.weights,
            capacity=problem.capacity,
            bin_of=bin_of,
            bins_per_part=num_microbatches,
            num_parts=dp_size,
            target=bound - overhead,
        )
    else:
        refined = bin_of.copy()
        bins_per_group = num_microbatches * span
        for group in range(dp_size // span):
            samples = np.flatnonzero(bin_of // bins_per_group == group)
            refined[samples] = group * bins_per_group + refine_rows(
                problem.costs[samples],
                weights=problem.weights[samples],
                capacity=problem.capacity,
                bin_of=bin_of[samples] - group * bins_per_group,
                num_bins=bins_per_group,
                bins_per_row=span,
            )
    again = _lay_out(problem, refined, num_microbatches=num_microbatches)
    # What refining counts leaves out slot order and shared expert work, so it may have lost.
    return again if again.predicted_cost < found.predicted_cost else found


def _plannings(problem: Problem) -> list[tuple[Problem, str]]:
    """Views of the problem to pack by: with which costs, and what keeps the groups of ranks that meet even.

    Where several groups meet in every micro-batch, none is best always. Own costs make the ranks of a row
    alike, costs with the shared expert work make the groups alike. Groups are kept even by their `sums`, or
    by the target heights of their `rows`, with high rows kept `apart`, or filled with other samples only as
    far as their shared work allows (`slim`).
    """
    if problem.sync_span == 1:
        return [(problem, "sums")]
    if problem.sync_span == problem.topology.dp_size:
        return [(problem, "rows")]
    with_shared = replace(problem, costs=problem.costs + problem.shared_costs)
    views = [problem, with_shared] if problem.shared_costs.any() else [problem]
    if problem.num_samples > MAX_REFINED_SAMPLES:
        # Those that were best on large batches; the others were a little better on small ones only.
        return [(problem, "slim"), *((view, "apart") for view in views)]
    return [(view, way) for view in views for way in ("slim", "rows", "apart", "sums")]


def _pack_levels(
    problem: Problem, *, num_microbatches: int, bins_per_row: int, way: str = "sums"
) -> tuple[NDArray[np.int64], int]:
    """Level packing with as many micro-batches as it takes, from `num_microbatches`."""
    dp_size, multiple = problem.topology.dp_size, problem.topology.microbatch_multiple
    # Samples that cost nothing are to be spread as well.
    costs = np.maximum(problem.costs, 1)
    attempts = 0
    while True:
        capacity = problem.capacity
        if problem.counts_samples:
            capacity = max(1, min(capacity, -(-problem.num_samples // (dp_size * num_microbatches))))
        heights = target_heights(
            problem,
            num_microbatches=num_microbatches,
            sync_span=dp_size if way == "sums" else bins_per_row,
            way=way,
        )
        if way == "sums":
            # The same rows in every group.
            heights = heights[::dp_size]
        bin_of = level_packing(
            costs,
            weights=problem.weights,
            capacity=capacity,
            target_heights=heights,
            num_groups=dp_size // bins_per_row if way == "sums" else 1,
            bins_per_row=bins_per_row if way == "sums" else 1,
            group_costs=costs + problem.shared_costs if problem.shared_costs.any() else None,
        )
        if bin_of is not None:
            return bin_of, num_microbatches
        # Longer strides after some attempts: with awkward lengths the start may be far too small.
        attempts += 1
        num_microbatches += multiple * max(1 + attempts // 4, num_microbatches // (64 * multiple))
        if attempts == 1 and not problem.counts_samples:
            # What first fit decreasing cannot do with fewer bins, filling by cost will not do either.
            num_bins = len(first_fit(problem.weights, capacity=capacity, decreasing=True))
            num_microbatches = max(num_microbatches, -(-num_bins // (dp_size * multiple)) * multiple)


def _place_by_ranks(
    problem: Problem, *, algorithm: str, samples_of: list[list[int]], move_samples: bool, num_microbatches: int
) -> Placement:
    """Every rank by itself, with the same number of micro-batches."""
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
            bins = _pack_rank(local, algorithm=algorithm, num_microbatches=num_microbatches, strict=strict)
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
    return _in_order(problem, slot_of, num_microbatches=num_microbatches)


def _assign_ranks(problem: Problem, *, algorithm: str) -> list[list[int]]:
    """Sample ids of every rank, by the cost of a sample; the same number each where samples are counted."""
    dp_size = problem.topology.dp_size
    costs = problem.costs + problem.shared_costs
    if algorithm == "greedy":
        most = -(-problem.num_samples // dp_size) if problem.counts_samples else None
        return greedy(costs, num_parts=dp_size, max_count=most)
    return karmarkar_karp(costs, num_parts=dp_size, equal_size=problem.counts_samples)


def _pack_rank(problem: Problem, *, algorithm: str, num_microbatches: int, strict: bool) -> list[list[int]]:
    """The micro-batches of one rank; some may be empty, or over the cap unless `strict`."""
    counted = problem.counts_samples
    if algorithm == "first_fit" or strict:
        return first_fit(problem.weights, capacity=problem.capacity, decreasing=strict)
    if algorithm == "karmarkar_karp":
        return karmarkar_karp(problem.costs, num_parts=num_microbatches, equal_size=counted)
    if algorithm == "greedy":
        return greedy(problem.costs, num_parts=num_microbatches, max_count=problem.capacity if counted else None)
    bin_of, num_bins = _pack_levels(problem, num_microbatches=num_microbatches, bins_per_row=1)
    return [np.flatnonzero(bin_of == index).tolist() for index in range(num_bins)]


def _fits(problem: Problem, bins: list[list[int]]) -> bool:
    """Whether no bin of two samples or more is over the cap."""
    weights = problem.weights.tolist()
    return all(len(items) < 2 or sum(weights[item] for item in items) <= problem.capacity for items in bins)


def _lay_out(
    problem: Problem, bin_of: NDArray[np.int64], *, num_microbatches: int, span: int | None = None
) -> Placement:
    """Gives the bins of each group to its ranks: sorted into rows, the rows dealt so that ranks cost the same."""
    span = span or problem.sync_span
    if span == 1:
        return _in_order(problem, bin_of, num_microbatches=num_microbatches)
    num_bins = problem.topology.dp_size * num_microbatches
    heights = np.zeros(num_bins, dtype=np.int64)
    np.add.at(heights, bin_of, problem.costs)
    slot_of_bin = np.empty(num_bins, dtype=np.int64)
    for first_rank in range(0, problem.topology.dp_size, span):
        first_bin = first_rank * num_microbatches
        of_group = heights[first_bin : first_bin + span * num_microbatches]
        order = np.argsort(-of_group, kind="stable")
        ranks = first_rank + karmarkar_karp_rows(of_group[order].reshape(num_microbatches, span))
        slots = ranks * num_microbatches + np.arange(num_microbatches)[:, None]
        slot_of_bin[first_bin + order] = slots.reshape(-1)
    return _in_order(problem, slot_of_bin[bin_of], num_microbatches=num_microbatches)


def _in_order(problem: Problem, slot_of: NDArray[np.int64], *, num_microbatches: int) -> Placement:
    """Orders the slots of each rank: a mountain for a pipeline, else by falling cost so that ranks are alike."""
    dp_size = problem.topology.dp_size
    own = np.zeros(dp_size * num_microbatches, dtype=np.int64)
    np.add.at(own, slot_of, problem.costs)
    check_total(problem, num_microbatches=num_microbatches)
    own = own.reshape(dp_size, num_microbatches)
    order = mountain_order(own) if problem.in_pipeline else np.argsort(-own, axis=1, kind="stable")
    new_slot = np.empty_like(order)
    np.put_along_axis(new_slot, order, np.arange(num_microbatches)[None, :].repeat(dp_size, axis=0), axis=1)
    new_slot += np.arange(dp_size)[:, None] * num_microbatches
    slot_of = new_slot.reshape(-1)[slot_of]
    grid = problem.cost_grid(slot_of, num_microbatches=num_microbatches)
    return Placement(
        slot_of=slot_of,
        num_microbatches=num_microbatches,
        cost_grid=grid,
        predicted_cost=problem.predicted_cost(grid),
    )
