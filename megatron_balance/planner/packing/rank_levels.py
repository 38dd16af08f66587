"""Level packing of ranks that do not meet in micro-batches: samples go to the least loaded rank with room.

In a rank they go to the micro-batch furthest below its target. Targets are even, except for micro-batches that a large
sample makes high. For a pipeline targets may fall from micro-batch to micro-batch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_balance.planner.bounds.time import slot_floor
from megatron_balance.planner.packing.empty_slots import fill_empty
from megatron_balance.planner.packing.fitting import pack_fitting
from megatron_balance.planner.packing.slot_layout import MAX_REFINED_SAMPLES, Placement, lay_out
from megatron_balance.planner.partition import level_packing, refine
from megatron_balance.planner.problem import Problem


def place_ranks(problem: Problem, *, num_microbatches: int, work: int, steepness: int = 0) -> Placement:
    """Places all samples, with no rank waiting for another before the end of the step.

    Args:
        problem: the global batch.
        num_microbatches: of every rank; raised until all samples fit.
        work: lower bound on the work of the slowest rank, without `per_microbatch`.
        steepness: of the targets, see `target_heights`.
    """
    dp_size = problem.topology.dp_size
    bin_of, num_microbatches = pack_ranks(problem, num_microbatches=num_microbatches, steepness=steepness)
    bin_of = fill_empty(problem, bin_of, num_parts=dp_size, bins_per_part=num_microbatches, across=True)
    found = lay_out(problem, bin_of, num_microbatches=num_microbatches)
    if problem.num_samples > MAX_REFINED_SAMPLES or problem.level:
        return found
    # Also divide the same micro-batches among the ranks as rows: with few samples this is often more even.
    as_rows = lay_out(problem, bin_of, num_microbatches=num_microbatches, span=dp_size)
    if as_rows.predicted_cost < found.predicted_cost:
        found, bin_of = as_rows, as_rows.slot_of
    refined = refine(
        problem.costs,
        weights=problem.weights,
        capacity=problem.capacity,
        bin_of=bin_of,
        num_groups=dp_size,
        bins_per_group=num_microbatches,
        target=work,
    )
    again = lay_out(problem, refined, num_microbatches=num_microbatches)
    # Refining ignores slot order and shared expert work, so its result may be slower.
    return again if again.predicted_cost < found.predicted_cost else found


def pack_ranks(problem: Problem, *, num_microbatches: int, steepness: int = 0) -> tuple[NDArray[np.int64], int]:
    """The micro-batch of each sample, `rank * num_microbatches + slot`, and the micro-batches that it took."""
    # Samples that cost nothing are to be spread as well.
    costs = np.maximum(problem.costs, 1)
    group_costs = costs + problem.shared_costs if problem.shared_costs.any() else None

    def pack(num_rows: int, capacity: int) -> NDArray[np.int64] | None:
        return level_packing(
            costs,
            weights=problem.weights,
            capacity=capacity,
            target_heights=target_heights(problem, num_microbatches=num_rows, steepness=steepness),
            num_groups=problem.topology.dp_size,
            bins_per_row=1,
            group_costs=group_costs,
        )

    return pack_fitting(problem, num_microbatches=num_microbatches, pack=pack)


def target_heights(problem: Problem, *, num_microbatches: int, steepness: int = 0) -> list[int]:
    """Target cost of each micro-batch of a rank, the same for every rank.

    Forced heights come first, as many as stand above what those micro-batches cannot hold. That is spread.

    Args:
        problem: the global batch.
        num_microbatches: of a rank.
        steepness: the highest target that is not forced is `1 + steepness` times the lowest; 0: even.

    Returns:
        `[num_microbatches]` falling costs.
    """
    dp_size = problem.topology.dp_size
    floor = slot_floor(problem, sync_group_size=dp_size)
    # Whole numbers that fall in even steps, each in the middle of its own.
    last = 2 * num_microbatches - 1
    profile = [2 * num_microbatches + steepness * (last - 2 * row) for row in range(num_microbatches)]
    total = int(problem.costs.sum())
    high: list[int] = []
    spread: list[int] = []
    for num_high in range(num_microbatches + 1):
        most_held = floor.held_costs[num_high] if num_high < len(floor.held_costs) else total
        behind = total - min(most_held, dp_size * sum(high))
        shares = dp_size * sum(profile[num_high:])
        spread = [-(-behind * share // shares) for share in profile[num_high:]]
        highest = spread[0] if spread else 0
        if num_high >= len(floor.forced_heights) or floor.forced_heights[num_high] <= highest:
            break
        high.append(floor.forced_heights[num_high])
    high = high[:num_microbatches]
    return high + spread[: num_microbatches - len(high)]
