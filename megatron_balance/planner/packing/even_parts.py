"""Evens out vision encoder and language model each, where ranks meet between the two.

There a slot takes the costliest encoder part of its ranks plus the costliest language part, and an even sum of both is
not enough. Samples are moved and swapped between the ranks of one slot, each time by the exchange that shortens the
slot most; number of micro-batches, samples of a slot and the cap stay as they are.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from megatron_balance.planner.packing.slot_layout import Placement
from megatron_balance.planner.problem import Problem
from megatron_balance.planner.sorting import stable_order

NUM_PARTNERS = 16
"""Ranks that a rank exchanges samples with at most, those with least of its costliest part. With all of 128 ranks plans
are 0.5 % shorter, and take ten times as long."""

MAX_SAMPLES = 2048
"""Most samples of a group in a slot whose parts are evened out, which takes time in proportion to ranks × samples."""


def even_parts(problem: Problem, found: Placement) -> Placement:
    """The placement with evened parts, or the same where no exchange shortens a slot.

    Args:
        problem: the global batch, with `image_costs`.
        found: its samples in the slots where they stay, on any rank of their group.
    """
    assert problem.image_costs is not None
    num_microbatches, span = found.num_microbatches, problem.sync_group_size
    rank, slot = np.divmod(found.slot_of, num_microbatches)
    cell = rank // span * num_microbatches + slot
    order = stable_order(cell)
    parts = np.stack([problem.image_costs, problem.costs - problem.image_costs])
    rank = rank.copy()
    for samples in np.split(order, np.flatnonzero(np.diff(cell[order])) + 1):
        if not 0 < samples.size <= MAX_SAMPLES:
            continue
        first = rank[samples[0]] // span * span
        rank[samples] = first + _even_slot(
            parts[:, samples],
            rank[samples] - first,
            weights=problem.weights[samples],
            num_ranks=span,
            capacity=problem.capacity,
        )
    slot_of = rank * num_microbatches + slot
    grid = problem.cost_grid(slot_of, num_microbatches=num_microbatches)
    image_grid = problem.image_grid(slot_of, num_microbatches=num_microbatches)
    predicted = problem.predicted_cost(grid, image_grid=image_grid)
    if predicted >= found.predicted_cost:
        return found
    return replace(found, slot_of=slot_of, cost_grid=grid, predicted_cost=predicted)


def _even_slot(
    parts: NDArray[np.int64],
    rank: NDArray[np.int64],
    *,
    weights: NDArray[np.int64],
    num_ranks: int,
    capacity: int,
) -> NDArray[np.int64]:
    """New ranks, `[num_samples]`, of one slot of a group. `parts`: `[2, num_samples]` costs."""
    rank = rank.copy()
    loads = np.zeros((2, num_ranks), dtype=np.int64)
    filled = np.zeros(num_ranks, dtype=np.int64)
    for load, part in zip(loads, parts, strict=True):
        np.add.at(load, rank, part)
    np.add.at(filled, rank, weights)
    # Behind the samples, one of no cost for each rank: swapped with it, a sample just moves. A rank's only sample never
    # does: the slot would be no shorter.
    num_samples = rank.size
    parts = np.concatenate([parts, np.zeros_like(loads)], axis=1)
    weights = np.concatenate([weights, np.zeros_like(filled)])
    rank = np.concatenate([rank, np.arange(num_ranks)])
    while True:
        height = int(loads.max(axis=1).sum())
        best: tuple[int, int, int] | None = None
        for part in range(2):
            high = int(loads[part].argmax())
            low = np.argsort(loads[part], kind="stable")[:NUM_PARTNERS]
            own = np.flatnonzero(rank == high)
            others = np.flatnonzero(np.isin(rank, low[low != high]))
            own = own[own < num_samples]
            if not own.size or not others.size:
                continue
            of_others = rank[others]
            leaves = parts[:, own, None] - parts[:, None, others]
            heavier = weights[own, None] - weights[None, others]
            fits = (filled[high] - heavier <= capacity) & (filled[of_others] + heavier <= capacity)
            heights = np.zeros(fits.shape, dtype=np.int64)
            for load, left in zip(loads, leaves, strict=True):
                rest = _highest_but(load, high, of_others)
                heights += np.maximum(np.maximum(load[high] - left, load[of_others] + left), rest)
            heights[~fits] = height
            index = int(heights.argmin())
            row, column = divmod(index, others.size)
            if heights[row, column] < (height if best is None else best[0]):
                best = int(heights[row, column]), int(own[row]), int(others[column])
        if best is None:
            return rank[:num_samples]
        _, one, other = best
        for load, part_of in ((loads[0], parts[0]), (loads[1], parts[1]), (filled, weights)):
            left = part_of[one] - part_of[other]
            load[rank[one]] -= left
            load[rank[other]] += left
        if other >= num_samples:
            rank[one] = rank[other]
        else:
            rank[one], rank[other] = rank[other], rank[one]


def _highest_but(load: NDArray[np.int64], high: int, others: NDArray[np.int64]) -> NDArray[np.int64]:
    """The highest load of the ranks besides `high` and each of `others`, `[num_others]`; 0 where there is none."""
    falling = np.argsort(-load, kind="stable")[:3]
    first, *second = falling[falling != high].tolist()
    return np.where(others == first, load[second[0]] if second else 0, load[first])
