"""Divides items among parts of nearly the same cost: largest differencing, and runs of padded samples.

Largest differencing is that of N. Karmarkar and R. M. Karp, "The differencing method of set partitioning" (1982), in
the form for more than two parts, which keeps the sums of all parts of each partial solution:

    1. every item is a partial solution: one part holds it, the others are empty
    2. take the two partial solutions of widest difference (largest sum minus smallest)
    3. join them crosswise: the largest part of one with the smallest of the other, and so on
    4. repeat until one solution remains
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count, pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError
from megatron_balance.planner.level_packing import Batch, Plan, order_apart, plan_slots, slot_numbers
from megatron_balance.planner.list_scheduling import fill_empty_bins
from megatron_balance.planner.objective import Pipeline, Waiting
from megatron_balance.planner.problem import INT_MAX, Ints, sums

_MAX_DIFFERENCED = 4096
"""Items up to which largest differencing, which is plain Python, is worth its time."""

_NEAR_ENOUGH = 10_000
"""Parts that differencing brings within 1/10,000 of the mean are taken: a search takes 20 times as long."""

_LIMITS = 2**16
"""Limits of a slot's cost in an octave, times samples: what they take in memory is bounded."""

_Part = tuple[int, int, list[int]]
"""`(-sum of costs, number, items)`; the number, unique, breaks ties."""


def plan_karmarkar_karp(batch: Batch, *, equal_count: bool, num_slots: int | None = None) -> Plan:
    """Largest differencing of samples over ranks, then of each over `num_slots` micro-batches or the fewest possible.

    There are more where one would be over the cap, until an over-long sample is alone. With `equal_count` ranks and
    micro-batches get the same number of samples, or one less.
    """
    costs, number = batch.local_cost, num_slots or slot_numbers(batch)[0]
    rank_of = _part_of(karmarkar_karp(costs + batch.expert_cost, num_parts=batch.num_ranks, equal_size=equal_count))
    rank_ids = [np.flatnonzero(rank_of == rank) for rank in range(batch.num_ranks)]
    while True:
        microbatch_of = np.zeros(batch.num_samples, dtype=np.int64)
        for rank, ids in enumerate(rank_ids):
            slots = _part_of(karmarkar_karp(costs[ids], num_parts=number, equal_size=equal_count))
            microbatch_of[ids] = rank * number + slots
        weights = sums(batch.weights, microbatch_of, batch.num_ranks * number)
        if not ((weights > batch.cap) & (np.bincount(microbatch_of, minlength=weights.size) > 1)).any():
            break
        number += batch.multiple * max(1, number // (32 * batch.multiple))
    order = np.argsort(-costs, kind="stable")
    microbatch_of[order] = fill_empty_bins(microbatch_of[order], batch.num_ranks * number)
    return Plan(order_apart(batch, microbatch_of, number), np.ones((batch.num_ranks, number), dtype=np.int64))


def partition_items(costs: Ints, *, num_parts: int, equal_count: bool) -> Ints:
    """The part of each item, of nearly the same cost: by largest differencing, or as ranks with one micro-batch.

    With `equal_count` every part holds the same number of items, or at most one more where that does not divide. Parts
    of any number are at most 1/10,000 costlier than those.
    """
    ways: list[Ints] = []

    def largest(part_of: Ints) -> int:
        return int(sums(costs, part_of, num_parts).max(initial=0))

    for equal in (True,) if equal_count else (False, True):
        if costs.size <= _MAX_DIFFERENCED:
            part_of = _part_of(karmarkar_karp(costs, num_parts=num_parts, equal_size=equal))
            if _NEAR_ENOUGH * (largest(part_of) * num_parts - int(costs.sum())) <= int(costs.sum()):
                return part_of
            ways.append(part_of)
        batch = Batch(
            costs[None],
            expert_cost=np.zeros_like(costs),
            weights=np.ones_like(costs),
            cap=max(-(-costs.size // num_parts) if equal else costs.size, 1),
            num_ranks=num_parts,
            waiting=Waiting(1, in_slots=False, pipeline=Pipeline()),
        )
        ways.append(plan_slots(batch, num_slots=1).microbatch_of)
    # The first of equals: the same choice everywhere.
    return min(ways, key=largest)


def karmarkar_karp(
    costs: Sequence[int] | NDArray[np.int64], *, num_parts: int, equal_size: bool = False
) -> list[list[int]]:
    """Splits items into parts of nearly equal cost by largest differencing: parts by descending cost, items ascending.

    With `equal_size` the numbers of items differ by one at most: step 1 starts from sorted items cut into rows, one
    item a part.
    """
    if num_parts < 1:
        raise BalanceError(f"num_parts is {num_parts}: it must be at least 1.")
    items: list[_Part] = sorted((-int(cost), item, [item]) for item, cost in enumerate(costs))
    width, numbers = num_parts if equal_size else 1, count(len(items))

    def ranked(parts: list[_Part]) -> tuple[int, int, list[_Part]]:
        """Widest difference first, then oldest. Empty parts are not listed."""
        smallest = parts[-1][0] if len(parts) == num_parts else 0
        return parts[0][0] - smallest, next(numbers), parts

    heap = [ranked(items[start : start + width]) for start in range(0, len(items), width)]
    heapify(heap)
    while len(heap) > 1:
        first, second = heappop(heap)[2], heap[0][2]
        # Of both the last parts are joined, those of `second` in reverse: the others meet empty parts.
        num_joined = max(len(first) + len(second) - num_parts, 0)
        start, tail = len(first) - num_joined, second[len(second) - num_joined :]
        joined = first[:start] + second[: len(second) - num_joined]
        for (cost, _, ids), (added, _, more_ids) in zip(first[start:], reversed(tail), strict=True):
            longer, shorter = (ids, more_ids) if len(ids) >= len(more_ids) else (more_ids, ids)
            longer.extend(shorter)
            joined.append((cost + added, next(numbers), longer))
        heapreplace(heap, ranked(sorted(joined)))
    parts = sorted((cost, sorted(ids)) for cost, _, ids in heap[0][2]) if heap else []
    return [ids for _, ids in parts] + [[] for _ in range(num_parts - len(parts))]


def _part_of(parts: list[list[int]]) -> Ints:
    """`[num_items]` part of each item."""
    part_of = np.zeros(sum(map(len, parts)), dtype=np.int64)
    for part, items in enumerate(parts):
        part_of[items] = part
    return part_of


def plan_padded(
    batch: Batch, *, max_tokens: int, max_samples: int | None, num_slots: int | None
) -> list[list[list[int]]]:
    """Micro-batches that are padded to their longest sample: each holds and costs its samples times that.

    In order of length a micro-batch is a run of neighbours. Runs are cut so that the costliest is as cheap as their
    number allows; where ranks meet in every micro-batch also so that each slot is a run of runs with a limit of its
    own, and the faster of both is taken. Like runs share a slot; where ranks meet once a step they get runs as evenly
    as they go. Returns for every rank, for every micro-batch, ascending sample ids: in the fewest micro-batches, or in
    `num_slots` of at most `max_tokens` and `max_samples`. A micro-batch is empty only where samples are too few.
    """
    order, size = np.lexsort((-batch.local_cost, -batch.weights)), batch.num_samples
    costs: list[int] = batch.local_cost[order].tolist()
    counts = (max_tokens // np.maximum(batch.weights[order], 1)).clip(1, min(max_samples or size, max(size, 1)))
    counts_list: list[int] = counts.tolist()

    def run_ends(limit: int) -> list[int]:
        """Where runs end that hold as many samples as the caps and a limit of their cost allow."""
        ends = [0]
        while ends[-1] < size:
            head = ends[-1]
            ends.append(min(head + min(counts_list[head], max(limit // costs[head], 1)), size))
        return ends

    fewest = max(-(-(len(run_ends(INT_MAX)) - 1) // batch.num_ranks), 1)
    number = num_slots or fewest
    if number < fewest:
        raise BalanceError(
            f"num_microbatches is {number}: padded samples need {fewest} under the caps. Give that many."
        )
    num_bins, low, high = number * batch.num_ranks, 0, max(costs, default=0) * size
    while low < high:
        limit = (low + high) // 2
        low, high = (low, limit) if len(run_ends(limit)) - 1 <= num_bins else (limit + 1, high)
    ways = [run_ends(high)]
    if batch.sync_size > 1 and size:
        ways.append(_ends_by_slots(batch.local_cost[order], counts, num_ranks=batch.num_ranks, num_slots=number))
    runs = min(
        (_costliest_first(costs, ends, num_runs=min(num_bins, size)) for ends in ways),
        key=lambda runs: sum(cost for cost, _, _ in runs[:: batch.num_ranks]),
    )
    rank_of = np.arange(num_bins) % batch.num_ranks
    if batch.sync_size == 1:
        run_costs = np.pad(np.array([cost for cost, _, _ in runs], dtype=np.int64), (0, num_bins - len(runs)))
        rank_of = partition_items(run_costs, num_parts=batch.num_ranks, equal_count=True)
    slots = [np.sort(order[start:end]).tolist() for _, start, end in runs] + [[] for _ in range(num_bins - len(runs))]
    return [[slots[index] for index in np.flatnonzero(rank_of == rank)] for rank in range(batch.num_ranks)]


def _costliest_first(costs: list[int], ends: list[int], *, num_runs: int) -> list[tuple[int, int, int]]:
    """`(cost, start, end)` of runs, of which the costliest are halved until there are so many."""
    runs = [(end - start == 1, -costs[start] * (end - start), start, end) for start, end in pairwise(ends)]
    heapify(runs)
    while len(runs) < num_runs:
        _, _, start, end = heappop(runs)
        middle = (start + end + 1) // 2
        for first, last in ((start, middle), (middle, end)):
            heappush(runs, (last - first == 1, -costs[first] * (last - first), first, last))
    return [(-cost, start, end) for cost, start, end in sorted(run[1:] for run in runs)]


def _ends_by_slots(costs: Ints, counts: Ints, *, num_ranks: int, num_slots: int) -> list[int]:
    """Where runs end, slot by slot, so that the sum of the slots' times is least among some limits of their cost.

    Costs descend, and a run that begins at a sample holds at most its count. Dynamic programming from the last sample
    on: the least time of the samples from each one on in one slot, in two, and so on.
    """
    size, never = costs.size, 1 << 61
    per_octave = min(max(_LIMITS // size, 2), 16)
    costs = -(-costs // (((int(costs[0]) * size * num_slots) >> 60) + 1))  # so that sums stay within int64
    # Two octaves below the mean and two above, the costs of samples that may begin a slot, and no limit.
    steps, mean = np.arange(4 * per_octave), int(costs.sum()) // (num_ranks * num_slots) + 1
    octaves = ((mean * (per_octave + steps % per_octave)) << (steps // per_octave)) // (4 * per_octave)
    limits = np.unique(np.concatenate([octaves, costs[: num_ranks * num_slots : num_ranks], [1 << 60]]))
    starts, samples = np.arange(size + 1), np.minimum(counts, limits[:, None] // costs)
    run_ends = np.pad((starts[:-1] + samples).clip(max=size), ((0, 0), (0, 1)), constant_values=size)
    ends, times = run_ends, np.pad(samples * costs, ((0, 0), (0, 1)))
    slot_ends, slot_times = np.broadcast_to(starts, ends.shape), np.zeros_like(times)
    for bit in f"{num_ranks:b}"[::-1]:  # a slot's runs, by powers of two
        if bit == "1":
            slot_times = np.maximum(slot_times, np.take_along_axis(times, slot_ends, axis=1))
            slot_ends = np.take_along_axis(ends, slot_ends, axis=1)
        times = np.maximum(times, np.take_along_axis(times, ends, axis=1))
        ends = np.take_along_axis(ends, ends, axis=1)
    slot_times = np.where(slot_ends > starts, slot_times, never)
    least, choices = np.where(starts < size, never, 0), list[Ints]()
    for _ in range(num_slots):
        totals = slot_times + least[slot_ends]
        choices.append(totals.argmin(axis=0))
        least = np.append(totals.min(axis=0)[:-1].clip(max=never), 0)
    chosen = [0]
    for choice in reversed(choices):
        limit = choice[chosen[-1]]
        for _ in range(num_ranks):
            chosen.append(int(run_ends[limit, chosen[-1]]))
    return sorted({*chosen})
