"""Rows of groups for ranks that all meet in every micro-batch: the objectives `microbatch` and `pipeline`.

For the most promising outlines (`row_outline.py`):

    1. samples above the common height open high rows, costliest first; others are placed beside them
    2. from the largest size down, samples go to packs of their size; a new pack takes free leaves of the highest row
    3. samples without room go to packs of the next larger size, whose ranks share them
    4. the remaining samples open additional rows, and the outline is tried again with higher rows

The packs are then arranged into rows again (`shelves.py`), and the fastest plan is kept: the least sum of heights, or
in a pipeline the least makespan of the rows in mountain order.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from megatron_balance.planner.dynamic_cp.groups import Groups
from megatron_balance.planner.dynamic_cp.packs import Packs
from megatron_balance.planner.dynamic_cp.row_outline import RowOutline, row_outlines
from megatron_balance.planner.dynamic_cp.samples import SizedSamples
from megatron_balance.planner.dynamic_cp.shelves import Shelves, shelve
from megatron_balance.planner.makespan import mountain_order, pipeline_makespans

_MAX_WORK = 3_000_000
"""Limit of `Packs.work` after which no further outline is filled: about 25 ms."""

_MAX_RAISES = 2
"""Heights to try per outline: trying more outlines gains more than trying more heights."""

_RAISED_WITHIN = 400
"""A second height is tried if the first plan is within one part in this many of the best."""


def place_in_rows(samples: SizedSamples, *, floor: int, multiple: int, pp_size: int = 1, vpp_size: int = 1) -> Groups:
    """Gives every sample a group, and every group a row and leaves.

    Args:
        samples: the global batch.
        floor: a lower bound on the work of the fullest leaf.
        multiple: rows are a multiple of this.
        pp_size: pipeline stages; 1 if stages do not matter.
        vpp_size: model chunks per stage.
    """
    best: Shelves | None = None
    best_time, order = 0, np.zeros(0, dtype=np.int64)
    work = 0
    idle_rows = Fraction(pp_size - 1, vpp_size)
    for outline in row_outlines(samples, floor=floor, multiple=multiple, idle_rows=idle_rows):
        if best is not None and (outline.time >= pp_size * best_time or work > _MAX_WORK):
            break
        height = outline.height + outline.height // 512
        for _ in range(_MAX_RAISES):
            packs, area_left = _fill(samples, outline=outline, height=height)
            work += packs.work
            shelves = shelve(samples, packs=packs, multiple=multiple)
            heights = np.array([shelves.heights], dtype=np.int64)
            in_order = mountain_order(heights) if pp_size > 1 else np.arange(heights.size)[None]
            time = int(pipeline_makespans(heights[:, in_order[0]], pp_size=pp_size, vpp_size=vpp_size)[0])
            if best is None or time < best_time:
                best, best_time, order = shelves, time, in_order[0]
            if not area_left or work > _MAX_WORK or time > best_time + best_time // _RAISED_WITHIN:
                break
            height += max(area_left // (outline.num_rows * samples.num_leaves), height // 256) + 1
    assert best is not None, "there is an outline for any samples"
    return best.groups(order)


def _fill(samples: SizedSamples, *, outline: RowOutline, height: int) -> tuple[Packs, int]:
    """Fills the rows of an outline to a height. Returns the packs and the cost of the samples that did not fit."""
    levels = samples.levels_within(outline.limit)
    costs = samples.costs_at(levels)
    packs = Packs(samples)

    high = np.flatnonzero(costs > height)
    high = high[np.lexsort((-levels[high], -costs[high]))]
    row_of, heights, spare = _high_rows(costs[high], levels=levels[high], num_leaves=samples.num_leaves)
    packs.open_with(high, levels=levels[high], targets=heights[row_of])
    num_low = max(outline.num_rows - heights.size, 0)
    heights = np.concatenate([heights, np.full(num_low, height, dtype=np.int64)])
    spare = np.concatenate([spare, np.full(num_low, samples.num_leaves, dtype=np.int64)])

    rest = np.flatnonzero(packs.pack_of < 0)
    order = rest[np.lexsort((-costs[rest], -levels[rest]))]
    of_levels = np.searchsorted(-levels[order], -np.arange(samples.num_levels + 1), side="right")
    homeless: list[NDArray[np.int64]] = []
    area_left = 0
    for level in range(samples.num_levels - 1, -1, -1):
        if not level:
            packs.open(0, targets=np.repeat(heights, spare))
        ids = packs.pour(order[of_levels[level + 1] : of_levels[level]], level=level)
        while level and ids.size:
            by_cost = -(-int(samples.costs[level, ids].sum()) // height) if height else 1
            by_tokens = -(-int(samples.tokens[level, ids].sum()) // samples.capacity)
            available = spare >> level
            wanted = max(by_cost, by_tokens, 1)
            taken = np.clip(wanted - (np.cumsum(available) - available), 0, available)
            if not taken.any():
                break
            spare -= taken << level
            packs.open(level, targets=np.repeat(heights, taken))
            ids = packs.pour(ids, level=level)
        for larger in range(level + 1, samples.num_levels):
            ids = packs.pour(ids, level=larger)
        if ids.size:
            area_left += int((samples.costs[level, ids] << level).sum())
            homeless.append(ids)
    if homeless:
        _open_rows(samples, np.concatenate(homeless), levels=levels, height=height, packs=packs)
    return packs, area_left


def _high_rows(
    costs: NDArray[np.int64], *, levels: NDArray[np.int64], num_leaves: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """First fit by falling cost: the row of each sample, the height of each row and the leaves it has left."""
    row_of: list[int] = []
    heights: list[int] = []
    spare: list[int] = []
    for cost, level in zip(costs.tolist(), levels.tolist(), strict=True):
        row = next((row for row, leaves in enumerate(spare) if leaves >> level), len(spare))
        if row == len(spare):
            heights.append(cost)
            spare.append(num_leaves)
        spare[row] -= 1 << level
        row_of.append(row)
    return np.array(row_of, dtype=np.int64), np.array(heights, dtype=np.int64), np.array(spare, dtype=np.int64)


def _open_rows(
    samples: SizedSamples, ids: NDArray[np.int64], *, levels: NDArray[np.int64], height: int, packs: Packs
) -> None:
    """Places samples in rows of their own. `levels`: `[num_samples]`."""
    costs = samples.costs_at(levels)
    while ids.size:
        spare = samples.num_leaves
        left: list[NDArray[np.int64]] = []
        for level in np.unique(levels[ids])[::-1].tolist():
            here = ids[levels[ids] == level]
            here = here[np.argsort(-costs[here], kind="stable")]
            first_pack = packs.levels.size
            num_new = min(spare >> level, here.size)
            spare -= num_new << level
            # An over-long sample fits no pack: those packs are opened with one each.
            over = here[samples.oversized[here]][:num_new]
            packs.open_with(over, levels=levels[over], targets=costs[over])
            here = here[packs.pack_of[here] < 0]
            packs.open(level, targets=np.full(num_new - over.size, max(height, int(costs[ids].max()))))
            left.append(packs.pour(here, level=level, first_pack=first_pack))
        ids = np.concatenate(left)
