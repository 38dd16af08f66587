"""Lower bound on the time of any plan with dynamic context-parallel sizes, communication included.

In a time T a sample runs at a size with room for its tokens at which its cost on each rank is at most T. Its total
cost is least at the smallest such size, because every further rank adds communication. So T is possible
only if these costs fit on the ranks, and for every size those of this size and larger ones fit on the ranks
that groups of this size cover. The least such T is found by bisection.
"""

from __future__ import annotations

import numpy as np

from megatron_balance.planner.dynamic_cp.samples import SizedSamples


def least_time(samples: SizedSamples, *, even: bool) -> int:
    """Lower bound on the time of the slowest rank in any plan, in cost units.

    Args:
        samples: the global batch.
        even: every rank runs the same number of micro-batches.
    """
    num_leaves, overhead = samples.num_leaves, samples.per_microbatch
    least_slots = num_leaves * least_rows(samples) if even else max(num_leaves, samples.room_needed // samples.capacity)
    if not samples.num_samples:
        return overhead
    low, high = 0, int(samples.costs[0].sum()) + int(samples.least_costs.sum()) + overhead * (least_slots + 1)
    while low < high:
        middle = (low + high) // 2
        if _is_possible(samples, time=middle, least_slots=least_slots):
            high = middle
        else:
            low = middle + 1
    return low


def least_rows(samples: SizedSamples) -> int:
    """Lower bound on the micro-batches of the busiest rank, from tokens; at least one."""
    return max(1, -(-samples.room_needed // (samples.capacity * samples.num_leaves)))


def _is_possible(samples: SizedSamples, *, time: int, least_slots: int) -> bool:
    """False where no plan ends within `time`. `least_slots`: micro-batches of all ranks, each counted once a rank."""
    height = time - samples.per_microbatch
    levels = samples.levels_within(height)
    costs = samples.costs_at(levels)
    if int(costs.max()) > height:
        return False
    areas = np.zeros(samples.num_levels, dtype=np.int64)
    np.add.at(areas, levels, costs << levels)
    of_larger = np.cumsum(areas[::-1])[::-1].tolist()
    if of_larger[0] + samples.per_microbatch * least_slots > time * samples.num_leaves:
        return False
    return all(area <= time * (samples.num_leaves >> level << level) for level, area in enumerate(of_larger))
