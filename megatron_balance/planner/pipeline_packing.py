"""Plans one global batch for ranks with pipeline stages, where a step takes as long as the slowest makespan.

1. Numbers of micro-batches: from the least that the cap allows, growing by an eighth, to one sample each.
2. For each number and two slopes: the slots of a sync group get targets that rise towards the middle of the step.
   Costliest sample first, to the bin furthest below its target that has room.
3. The best plans are improved in turns by exchanges (`local_search.py`), and fewer of them from turn to turn.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megatron_balance.planner.level_packing import Batch, Plan, assign_samples, equalize, order_slots
from megatron_balance.planner.list_scheduling import fill_empty_bins
from megatron_balance.planner.local_search import LocalSearch
from megatron_balance.planner.problem import Ints

EFFORT = 2400
"""Rounds of the local search over all plans."""

_SLOPES = (2, 8)
"""Slopes of targets: the middle slot costs three or nine times the first and the last."""

_MAX_STARTED = 2**18
"""Samples in starts of each way; where they are more, fewer numbers of micro-batches are tried, at least three."""

_SURVIVORS = (24, 8, 2, 1)
"""Plans that are improved in each turn."""


def plan_pipeline(batch: Batch, *, num_slots: int | None = None, effort: int = EFFORT) -> Plan:
    """Plans a batch whose ranks have pipeline stages, in `num_slots` micro-batches or in the number that is best.

    `effort`, the improvements tried, is the same on all ranks.
    """
    order = np.lexsort((-batch.weights, -batch.local_cost))
    batch = batch.take(order)
    starts: list[tuple[Ints, int]] = []
    numbers = slot_numbers(batch, num_slots)
    numbers = numbers[:: -(-len(numbers) // max(_MAX_STARTED // max(batch.num_samples, 1), 3))]
    while not starts:
        starts += [(bin_of, number) for number in numbers for bin_of in _starts(batch, number)]
        numbers = [numbers[-1] + batch.multiple * max(1, numbers[-1] // (32 * batch.multiple))]
    microbatch_of = np.empty_like(order)
    microbatch_of[order], number = search_makespan(batch, starts, effort=effort)
    return Plan(microbatch_of, np.ones((batch.num_ranks, number), dtype=np.int64))


def search_makespan(
    batch: Batch, starts: list[tuple[Ints, int]], *, fixed_ranks: bool = False, effort: int = EFFORT
) -> tuple[Ints, int]:
    """The best plan that exchanges lead to: `rank * num_microbatches + slot` of each sample, and their number.

    Args:
        batch: the samples.
        starts: pairs of `[num_samples]` `(group * num_slots + slot) * sync_size + column` and num_slots.
        fixed_ranks: samples stay on their ranks.
        effort: rounds of the search over all plans.
    """
    searches = [LocalSearch(batch, *start, fixed_ranks=fixed_ranks) for start in starts]
    for survivors in _SURVIVORS:
        searches = sorted(searches, key=lambda search: search.time)[:survivors]
        for search in searches:
            search.improve(effort // (len(_SURVIVORS) * len(searches)))
    best = searches[0]
    slot, column = np.divmod(best.bin_of, batch.sync_size)
    group, slot = np.divmod(slot, best.num_slots)
    return (group * batch.sync_size + column) * best.num_slots + slot, best.num_slots


def slot_numbers(batch: Batch, num_slots: int | None = None) -> list[int]:
    """Numbers to try, ascending, from what the cap allows to one sample each.

    At most eight times the smallest, or four for each stage.
    """
    if num_slots is not None:
        return [num_slots]
    multiple, smallest = batch.multiple, batch.min_slots
    largest = max(8 * smallest, 4 * batch.waiting.pipeline.num_stages)
    largest = max(min(-(-batch.num_samples // (batch.num_ranks * multiple)), largest // multiple) * multiple, smallest)
    numbers = [smallest]
    while numbers[-1] < largest:
        numbers.append(min(max(-(-numbers[-1] * 9 // (8 * multiple)) * multiple, numbers[-1] + multiple), largest))
    return numbers


def profiles(batch: Batch, num_slots: int) -> list[Ints]:
    """`[num_slots]` relative targets of slots, each a way to start.

    They rise towards the middle, to three or nine times the first. Under several chunks a stage runs a group of
    micro-batches through a chunk before the next one: the second way has groups of like ones, each descending slightly.
    """
    pipeline = batch.waiting.pipeline
    groups, remainder = divmod(num_slots, pipeline.group_size)
    if pipeline.num_chunks == 1 or remainder:
        return [_mountain(num_slots, slope) for slope in _SLOPES]
    descending = np.tile(np.arange(pipeline.group_size)[::-1], groups)
    by_group = _mountain(groups, _SLOPES[0]).repeat(pipeline.group_size)
    return [_mountain(num_slots, _SLOPES[0]), 10 * by_group + descending]


def _mountain(number: int, slope: int) -> Ints:
    index = np.arange(number)
    height = np.minimum(index, index[::-1])
    return max(int(height.max()), 1) + slope * height


def _starts(batch: Batch, num_slots: int) -> Iterator[Ints]:
    """Ways to begin, `(group * num_slots + slot) * sync_size + column` of each sample; none where one finds no room.

    Bins that are equally far below their targets come group by group, so that the costliest samples share a group, or
    in turns. Where ranks meet, also slots of like samples as without stages, the longest in the middle, for two caps of
    expert work.
    """
    bins = np.arange(batch.num_ranks * num_slots).reshape(batch.num_groups, -1)
    for profile in profiles(batch, num_slots):
        targets = profile * (int(batch.local_cost.sum()) // (batch.num_ranks * int(profile.sum())) + 1)
        targets = np.tile(targets.repeat(batch.sync_size), batch.num_groups)
        for order in (bins.reshape(-1), bins.T.reshape(-1))[: batch.num_groups]:
            index = assign_samples(batch, np.arange(batch.num_samples), targets[order, None])
            if (index >= 0).all():
                yield fill_empty_bins(order[index], bins.size)
    highest = int(batch.local_cost.max(initial=0))
    for expert_cap in (highest + highest // 4, batch.min_work) if batch.sync_size > 1 else ():
        packing = equalize(batch, num_slots, slope=0, expert_cap=expert_cap)
        if packing is not None:
            rank, slot = np.divmod(order_slots(batch, packing.bin_of, num_slots), num_slots)
            group, column = np.divmod(rank, batch.sync_size)
            yield (group * num_slots + slot) * batch.sync_size + column
