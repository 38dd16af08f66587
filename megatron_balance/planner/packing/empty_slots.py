"""No rank runs an empty micro-batch while another holds two samples in one.

An empty slot would run as a masked dummy: all the fixed costs, and nothing learnt. A rank that meets no other in its
micro-batches halves its own, which costs nothing, and only then takes samples of other ranks. In a group of ranks that
meet, halving would make a low row high, so there the cheapest samples of all move.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from megatron_balance.planner.partition import greedy
from megatron_balance.planner.problem import Problem
from megatron_balance.planner.sorting import stable_order


def fill_empty(
    problem: Problem, bin_of: NDArray[np.int64], *, num_parts: int, bins_per_part: int, across: bool
) -> NDArray[np.int64]:
    """Fills empty bins where there are samples for them.

    Args:
        problem: the global batch.
        bin_of: `[num_samples]` bin of each sample.
        num_parts: parts: ranks, or groups of ranks that meet in every micro-batch.
        bins_per_part: bins of a part.
        across: samples may go to other parts.

    Returns:
        `[num_samples]` bin of each sample.
    """
    num_bins = num_parts * bins_per_part
    counts = np.bincount(bin_of, minlength=num_bins)
    if counts.all():
        return bin_of
    bin_of = bin_of.copy()
    enough = problem.num_samples >= num_bins
    if not (problem.sync_group_size > 1 and across and enough):
        for part in np.flatnonzero((counts.reshape(num_parts, bins_per_part) == 0).any(axis=1)).tolist():
            _split_bins(problem, bin_of, bins=range(part * bins_per_part, (part + 1) * bins_per_part))
    if across and enough:
        _fill_with_cheapest(problem, bin_of, num_parts=num_parts, bins_per_part=bins_per_part)
    return bin_of


def _split_bins(problem: Problem, bin_of: NDArray[np.int64], *, bins: range) -> None:
    """Halves the costliest bin of two samples or more, until no bin of the part is empty, in place."""
    samples = np.flatnonzero((bin_of >= bins.start) & (bin_of < bins.stop))
    costs = dict(zip(samples.tolist(), problem.costs[samples].tolist(), strict=True))
    held: dict[int, list[int]] = {index: [] for index in bins}
    for sample in costs:
        held[int(bin_of[sample])].append(sample)
    empty = [index for index, ids in held.items() if not ids]
    # A heap of what can be halved, costliest on top.
    splittable = [(-sum(costs[s] for s in ids), index) for index, ids in held.items() if len(ids) > 1]
    heapify(splittable)
    for new in empty:
        if not splittable:
            break
        old = heappop(splittable)[1]
        ids = held[old]
        halves = greedy([costs[sample] for sample in ids], num_parts=2)
        for index, half in zip((old, new), halves, strict=True):
            held[index] = [ids[item] for item in half]
            bin_of[held[index]] = index
            if len(half) > 1:
                heappush(splittable, (-sum(costs[s] for s in held[index]), index))


def _fill_with_cheapest(problem: Problem, bin_of: NDArray[np.int64], *, num_parts: int, bins_per_part: int) -> None:
    """Moves the cheapest samples that have company into empty bins, in place; the parts of least cost come first."""
    counts = np.bincount(bin_of, minlength=num_parts * bins_per_part)
    empty = np.flatnonzero(counts == 0)
    if not empty.size:
        return
    rising = stable_order(problem.costs)
    # The costliest sample of each bin stays, so that no bin is emptied: of several entries the last is kept.
    stays = np.full(counts.size, -1, dtype=np.int64)
    stays[bin_of[rising]] = np.arange(rising.size)
    spare = np.ones(rising.size, dtype=np.bool_)
    spare[stays[counts > 0]] = False
    moved = rising[spare][: empty.size]
    loads = np.zeros(num_parts, dtype=np.int64)
    np.add.at(loads, bin_of // bins_per_part, problem.costs)
    order = np.argsort(loads[empty // bins_per_part], kind="stable")
    bin_of[moved[::-1]] = empty[order[: moved.size]]
