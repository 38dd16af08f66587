"""Level packing of groups of ranks that meet in every micro-batch: an expert-parallel group, or all ranks.

A group of e ranks runs M rows of e micro-batches one after another. It waits for the costliest of each row, and it
computes the expert work of all its samples together.

    1. rows that a large sample makes high are packed full, costliest samples first (`partition/peeling.py`), but
       never beyond the time that no plan can beat: beside a giant, samples still cost their expert work
    2. high rows are assigned to groups, the longest to the group with the least time so far
    3. the remaining time is distributed over the other rows so that all groups end together; if high rows alone make
       them end later, higher limits are tried
    4. the remaining samples go, costliest first, to the micro-batch furthest below its target
    5. a row waits for its highest micro-batch, which targets do not include: the time of a group above the mean is
       subtracted from its other rows, and steps 3 and 4 are repeated
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from megatron_balance.planner.bounds.time import least_time
from megatron_balance.planner.packing.empty_slots import fill_empty
from megatron_balance.planner.packing.fitting import capacity_of_one, pack_fitting
from megatron_balance.planner.packing.slot_layout import MAX_REFINED_SAMPLES, Placement, lay_out
from megatron_balance.planner.partition import level_packing, peel_rows, refine
from megatron_balance.planner.problem import Problem

MAX_CORRECTIONS = 3
"""Most repetitions of step 5."""

MAX_LIMITS = 3
"""Additional limits of high rows to try."""

WORTH_LIMITS = 256
"""They are tried where the mean of groups is one part in this many above `work`: below, corrections do as well."""


def place_groups(problem: Problem, *, num_microbatches: int, work: int, fill: bool = True) -> Placement | None:
    """Places all samples, with the ranks of a group waiting for one another in every micro-batch.

    Args:
        problem: the global batch.
        num_microbatches: of every rank; raised until all samples fit, where rows are filled.
        work: lower bound on the work of the slowest group, without `per_microbatch`.
        fill: put samples beside those that make a row high.

    Returns:
        None where samples do not fit beside bare rows.
    """
    alone = problem.sync_group_size == problem.topology.dp_size
    limit = None if alone else work if fill else 0
    packed: _GroupPacking | None = None

    def pack(num_rows: int, capacity: int) -> NDArray[np.int64] | None:
        nonlocal packed
        packed = _GroupPacking(problem, num_rows=num_rows, capacity=capacity, limit=limit)
        return packed.bins()

    if fill:
        bin_of, num_microbatches = pack_fitting(problem, num_microbatches=num_microbatches, pack=pack)
    else:
        bin_of = pack(num_microbatches, capacity_of_one(problem, num_microbatches=num_microbatches))
        if bin_of is None:
            return None
    assert packed is not None
    found = _laid_out(problem, bin_of, num_microbatches=num_microbatches)
    higher = _with_higher_rows(packed, found[0], work=work) if limit else None
    bound = least_time(problem, work=work, num_microbatches=num_microbatches)
    best, best_bins = _corrected(packed, *found) if higher is None else _corrected(*higher)
    # Correcting takes as much off the one as off the other, unless the one is out of reach.
    if higher is not None and found[0].predicted_cost - bound < 2 * (higher[1].predicted_cost - bound):
        again, bin_of = _corrected(packed, *found)
        if again.predicted_cost < best.predicted_cost:
            best, best_bins = again, bin_of
    if problem.num_samples <= MAX_REFINED_SAMPLES and not problem.level:
        refined = refine(
            problem.costs,
            weights=problem.weights,
            capacity=problem.capacity,
            bin_of=best_bins,
            num_groups=packed.num_groups,
            bins_per_group=num_microbatches * packed.span,
            bins_per_row=packed.span,
            shared=problem.shared_costs,
            target=work,
        )
        found = lay_out(problem, refined, num_microbatches=num_microbatches)
        # Refining ignores slot order, so its result may be slower.
        if found.predicted_cost < best.predicted_cost:
            best = found
    return best


class _GroupPacking:
    """Steps 1 and 2, done once, and steps 3 and 4, done for any corrections."""

    def __init__(self, problem: Problem, *, num_rows: int, capacity: int, limit: int | None) -> None:
        self.problem, self.capacity = problem, capacity
        self.span = problem.sync_group_size
        self.num_groups = problem.topology.dp_size // self.span
        # Samples that cost nothing are to be spread as well.
        self.costs = np.maximum(problem.costs, 1)
        self.bin_of, num_high = peel_rows(
            self.costs,
            shared=problem.shared_costs,
            weights=problem.weights,
            capacity=capacity,
            num_rows=num_rows * self.num_groups,
            bins_per_row=self.span,
            limit=limit,
        )
        high = np.flatnonzero(self.bin_of >= 0)
        row, column = np.divmod(self.bin_of[high], self.span)
        heights = np.zeros(num_high * self.span, dtype=np.int64)
        np.add.at(heights, self.bin_of[high], self.costs[high])
        shared = np.zeros(num_high, dtype=np.int64)
        np.add.at(shared, row, problem.shared_costs[high])
        times = heights.reshape(num_high, self.span).max(axis=1, initial=0) + shared // self.span
        row_of, self.bases, num_high_of = _deal(times.tolist(), num_groups=self.num_groups, num_rows=num_rows)
        self.bin_of[high] = row_of[row] * self.span + column
        self.left = np.flatnonzero(self.bin_of < 0)
        self.num_open = num_rows - num_high_of
        # Row by row through all groups: where micro-batches are equal, the groups take turns.
        open_row, self.open_group = np.nonzero(np.arange(num_rows)[:, None] >= num_high_of)
        first_bin = (self.open_group * num_rows + open_row) * self.span
        self.open_bins = (first_bin[:, None] + np.arange(self.span)).reshape(-1)

    def bins(self, corrections: NDArray[np.int64] | int = 0) -> NDArray[np.int64] | None:
        """Steps 3 and 4. Returns the bin of each sample, None where one found no room.

        Args:
            corrections: `[num_groups]` additional time to assume for each group.
        """
        bin_of = self.bin_of.copy()
        if not self.left.size:
            return bin_of
        own, shared = int(self.costs[self.left].sum()), int(self.problem.shared_costs[self.left].sum())
        bases, num_open = (self.bases + corrections).tolist(), self.num_open.tolist()
        level = _water_level(bases, open_rows=num_open, volume=-(-(own + shared) // self.span))
        # Of a row's time, the part that is no expert work is the height of its micro-batches.
        heights = [
            (level - base) * own // ((own + shared) * max(count, 1))
            for base, count in zip(bases, num_open, strict=True)
        ]
        found = level_packing(
            self.costs[self.left],
            weights=self.problem.weights[self.left],
            capacity=self.capacity,
            target_heights=np.repeat(np.array(heights)[self.open_group], self.span).tolist(),
            num_groups=1,
            bins_per_row=1,
        )
        if found is None:
            return None
        bin_of[self.left] = self.open_bins[found]
        return bin_of


def _with_higher_rows(
    packed: _GroupPacking, found: Placement, *, work: int
) -> tuple[_GroupPacking, Placement, NDArray[np.int64]] | None:
    """The best packing with a higher limit of high rows than `work`, placed, and its bins; None where none is better.

    Groups can end together at their mean. Where that is above the limit, high rows waste too much: fewer and fuller
    ones take less, so that the least limit which the mean stays below is searched for by halving.
    """
    problem, num_microbatches = packed.problem, found.num_microbatches
    launches = num_microbatches * problem.per_microbatch
    best, best_cost = None, found.predicted_cost
    low, high = work, best_cost * problem.timing.stages - launches
    mean = int(_group_times(problem, found).mean()) - launches
    for _ in range(MAX_LIMITS if mean - work > work // WORTH_LIMITS else 0):
        limit = (low + high) // 2
        packed = _GroupPacking(problem, num_rows=num_microbatches, capacity=packed.capacity, limit=limit)
        again = packed.bins()
        if again is None:
            break
        found, again = _laid_out(problem, again, num_microbatches=num_microbatches)
        if found.predicted_cost < best_cost:
            best, best_cost = (packed, found, again), found.predicted_cost
        mean = int(_group_times(problem, found).mean()) - launches
        low, high = (limit, high) if mean > limit else (low, limit)
    return best


def _corrected(
    packed: _GroupPacking, best: Placement, best_bins: NDArray[np.int64]
) -> tuple[Placement, NDArray[np.int64]]:
    """The best of a packing and its corrections (step 5), placed, and its bins."""
    problem = packed.problem
    corrections = np.zeros(packed.num_groups, dtype=np.int64)
    found = best
    for _ in range(MAX_CORRECTIONS):
        excess = _excess(problem, found, at_most=best.predicted_cost)
        if excess is None:
            break
        corrections += excess
        again = packed.bins(corrections)
        if again is None:
            break
        found, again = _laid_out(problem, again, num_microbatches=best.num_microbatches)
        if found.predicted_cost < best.predicted_cost:
            best, best_bins = found, again
    return best, best_bins


def _deal(
    times: list[int], *, num_groups: int, num_rows: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Rows to groups, longest first, to the group with the least time and rows left.

    Returns:
        row_of: `[num_high]` `group * num_rows + row`.
        bases: `[num_groups]` time of each group.
        counts: `[num_groups]` rows of each group.
    """
    row_of = np.empty(len(times), dtype=np.int64)
    bases, counts = np.zeros((2, num_groups), dtype=np.int64)
    shortest = [(0, group) for group in range(num_groups)]
    for row in sorted(range(len(times)), key=lambda row: (-times[row], row)):
        base, group = heappop(shortest)
        row_of[row] = group * num_rows + counts[group]
        bases[group] = base + times[row]
        counts[group] += 1
        if counts[group] < num_rows:
            heappush(shortest, (int(bases[group]), group))
    return row_of, bases, counts


def _water_level(bases: list[int], *, open_rows: list[int], volume: int) -> int:
    """Level to which `volume` rises over vessels that stand on `bases`; those with no open row take none."""
    vessels = sorted(base for base, num_open in zip(bases, open_rows, strict=True) if num_open)
    level = vessels[0] if vessels else 0
    for width, base in enumerate(vessels[1:], start=1):
        step = (base - level) * width
        if step >= volume:
            return level - (-volume // width)
        volume -= step
        level = base
    return level - (-volume // max(len(vessels), 1))


def _laid_out(
    problem: Problem, bin_of: NDArray[np.int64], *, num_microbatches: int
) -> tuple[Placement, NDArray[np.int64]]:
    """The placement of a packing whose empty bins were filled, and that packing."""
    span = problem.sync_group_size
    bin_of = fill_empty(
        problem,
        bin_of,
        num_parts=problem.topology.dp_size // span,
        bins_per_part=num_microbatches * span,
        across=True,
    )
    return lay_out(problem, bin_of, num_microbatches=num_microbatches), bin_of


def _group_times(problem: Problem, placement: Placement) -> NDArray[np.int64]:
    """Total cost of the rows of each group, `[num_groups]`."""
    of_groups = placement.cost_grid.reshape(-1, problem.sync_group_size, placement.num_microbatches)
    return of_groups.max(axis=1).sum(axis=1)


def _excess(problem: Problem, placement: Placement, *, at_most: int) -> NDArray[np.int64] | None:
    """Work of each group above their mean; None where groups of the mean would cost `at_most` or more all the same."""
    of_groups = placement.cost_grid.reshape(-1, problem.sync_group_size, placement.num_microbatches)
    times = problem.timing.times(of_groups.max(axis=1))
    mean = int(times.sum()) // times.size
    if int(times.max()) == mean or mean >= at_most:
        return None
    return (times - mean) * problem.timing.stages
