"""Level packing of a planning problem: the micro-batches of all ranks as one set of bins.

With several groups of ranks that meet in every micro-batch, there are several views to pack by, and the groups
end uneven: rows wait for their highest micro-batch, which targets do not foresee. So what a group is above the
others is taken off its targets, and all is packed again.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from megatron_balance.planner.packing.empty_slots import fill_empty
from megatron_balance.planner.packing.heights import target_heights
from megatron_balance.planner.packing.slot_layout import Placement, lay_out
from megatron_balance.planner.partition import first_fit, level_packing, refine_parts, refine_rows
from megatron_balance.planner.problem import Problem

MAX_REFINED_SAMPLES = 1024
"""Refining looks at pairs of samples; larger batches are within a fraction of a percent without it."""

MAX_EVENINGS = 3
"""Packings again with other targets where groups end uneven; each takes as long as the first."""


def place_by_levels(problem: Problem, *, num_microbatches: int, bound: int, steepness: int = 0) -> Placement:
    """All micro-batches of all ranks as one set of bins.

    Args:
        problem: the global batch.
        num_microbatches: of every rank; more where it takes more.
        bound: no plan costs less.
        steepness: of the targets where ranks do not meet in micro-batches (`heights.py`).
    """
    dp_size, span = problem.topology.dp_size, problem.sync_span
    found: Placement | None = None
    bin_of = np.zeros(0, dtype=np.int64)
    for planned, way in _plannings(problem):
        lowered: list[int] | None = None
        planned_for = num_microbatches
        for _ in range(1 + MAX_EVENINGS):
            packed, needed = pack_levels(
                planned,
                num_microbatches=num_microbatches,
                bins_per_row=span,
                way=way,
                lowered=lowered,
                steepness=steepness,
            )
            packed = fill_empty(planned, packed, num_parts=dp_size // span, bins_per_part=needed * span, across=True)
            placement = lay_out(problem, packed, num_microbatches=needed)
            if found is None or placement.predicted_cost < found.predicted_cost:
                found, bin_of = placement, packed
            # Targets of other rows would lower other groups than those that were measured.
            if way == "sums" or span == dp_size or (lowered is not None and needed != planned_for):
                break
            planned_for = needed
            excess = _excess(problem, placement, at_most=found.predicted_cost)
            if excess is None:
                break
            # Targets are of the costs to pack by: their part of the excess.
            part, whole = int(planned.costs.sum()), int(problem.costs.sum()) + int(problem.shared_costs.sum())
            before = lowered or [0] * len(excess)
            lowered = [cost + more * part // max(whole, 1) for cost, more in zip(before, excess, strict=True)]
    assert found is not None
    num_microbatches = found.num_microbatches
    if span == 1 and found.predicted_cost > bound:
        # The same micro-batches dealt to the ranks anew, as rows: often the ranks are more alike.
        dealt = lay_out(problem, bin_of, num_microbatches=num_microbatches, span=dp_size)
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
    again = lay_out(problem, refined, num_microbatches=num_microbatches)
    # What refining counts leaves out slot order and shared expert work, so it may have lost.
    return again if again.predicted_cost < found.predicted_cost else found


def _excess(problem: Problem, placement: Placement, *, at_most: int) -> list[int] | None:
    """Cost of each group above their mean; None where groups of the mean would cost `at_most` or more all the same."""
    of_groups = placement.cost_grid.reshape(-1, problem.sync_span, placement.num_microbatches)
    costs: list[int] = of_groups.max(axis=1).sum(axis=1).tolist()
    mean = sum(costs) // len(costs)
    # A makespan is no sum of micro-batches: there, nothing is known before it is tried.
    if max(costs) == mean or (mean >= at_most and not problem.in_pipeline):
        return None
    return [cost - mean for cost in costs]


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


def pack_levels(
    problem: Problem,
    *,
    num_microbatches: int,
    bins_per_row: int,
    way: str = "sums",
    lowered: list[int] | None = None,
    steepness: int = 0,
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
            lowered=lowered,
            steepness=steepness,
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
