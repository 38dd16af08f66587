"""Arranges packs into rows by first fit of falling cost, as in strip packing with shelves.

Packs of one row should be equally high, so the costliest are placed together. Free ranks of a row join its costliest
groups: this lowers the row and avoids dummies.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

import numpy as np
from numpy.typing import NDArray

from megatron_balance.planner.dynamic_cp.groups import Groups
from megatron_balance.planner.dynamic_cp.packs import Packs
from megatron_balance.planner.dynamic_cp.samples import SizedSamples


@dataclass(frozen=True)
class Shelves:
    """Packs in rows.

    Attributes:
        heights: `[num_rows]` cost of each row, fixed costs included.
        rows: `[num_rows]` packs of each row; the last ones may be empty.
        levels: `[num_packs]` int64.
        pack_of: `[num_samples]` int64.
        num_leaves: ranks of a row.
    """

    heights: tuple[int, ...]
    rows: list[list[int]]
    levels: NDArray[np.int64]
    pack_of: NDArray[np.int64]
    num_leaves: int

    def groups(self, order: NDArray[np.int64]) -> Groups:
        """The packs as groups, the largest of a row first, so that each starts at a multiple of its size.

        Args:
            order: `[num_rows]` row of each slot.
        """
        number = np.full(self.levels.size, -1, dtype=np.int64)
        levels: list[int] = []
        firsts: list[int] = []
        slots: list[int] = []
        row_of: list[int] = order.tolist()
        for slot, row in enumerate(row_of):
            first = 0
            of_packs: list[int] = self.levels[self.rows[row]].tolist()
            by_level: list[tuple[int, int]] = [
                (-level, pack) for level, pack in zip(of_packs, self.rows[row], strict=True)
            ]
            for falling, pack in sorted(by_level):
                level = -falling
                number[pack] = len(levels)
                levels.append(level)
                firsts.append(first)
                slots.append(slot)
                first += 1 << level
        return Groups(
            group_of=number[self.pack_of],
            levels=np.array(levels, dtype=np.int64),
            first_leaves=np.array(firsts, dtype=np.int64),
            slots=np.array(slots, dtype=np.int64),
            num_slots=np.full(self.num_leaves, len(self.rows), dtype=np.int64),
        )


def shelve(samples: SizedSamples, *, packs: Packs, multiple: int) -> Shelves:
    """Arranges all packs that hold samples in a multiple of `multiple` rows."""
    levels = packs.levels.copy()
    loads = np.zeros(levels.size, dtype=np.int64)
    np.add.at(loads, packs.pack_of, samples.costs_at(levels[packs.pack_of]))
    used = np.flatnonzero(np.bincount(packs.pack_of, minlength=levels.size))
    order = used[np.lexsort((-levels[used], -loads[used]))]
    rows: list[list[int]] = []
    spare: list[int] = []
    first_open = 0
    for pack, level in zip(order.tolist(), levels[order].tolist(), strict=True):
        while first_open < len(spare) and not spare[first_open]:
            first_open += 1
        row = next((row for row in range(first_open, len(spare)) if spare[row] >> level), len(spare))
        if row == len(spare):
            rows.append([])
            spare.append(samples.num_leaves)
        spare[row] -= 1 << level
        rows[row].append(pack)
    by_pack = np.argsort(packs.pack_of, kind="stable")
    ends = np.cumsum(np.bincount(packs.pack_of, minlength=levels.size))
    heights: list[int] = []
    for row, leaves in zip(rows, spare, strict=True):
        heap = [(-int(loads[pack]), pack) for pack in row]
        heapify(heap)
        heights.append(-_widen(samples, heap, spare=leaves, levels=levels, by_pack=by_pack, ends=ends))
    rows += [[] for _ in range(-len(rows) % multiple if rows else multiple)]
    heights += [0] * (len(rows) - len(heights))
    fixed = samples.per_microbatch
    return Shelves(
        tuple(height + fixed for height in heights),
        rows=rows,
        levels=levels,
        pack_of=packs.pack_of,
        num_leaves=samples.num_leaves,
    )


def _widen(
    samples: SizedSamples,
    heap: list[tuple[int, int]],
    *,
    spare: int,
    levels: NDArray[np.int64],
    by_pack: NDArray[np.int64],
    ends: NDArray[np.int64],
) -> int:
    """Doubles the costliest groups of a row while it has free leaves.

    Args:
        samples: the global batch.
        heap: `(-cost, pack)` of the row.
        spare: free leaves.
        levels: `[num_packs]`, changed in place.
        by_pack: `[num_samples]` samples, pack by pack.
        ends: `[num_packs]` their ends in it.

    Returns:
        The negative height of the row.
    """
    fixed = 0
    while spare and heap:
        load, pack = heap[0]
        height = -min(fixed, load)
        ids = by_pack[ends[pack - 1] if pack else 0 : ends[pack]]
        level = int(levels[pack])
        larger = min(level + 1, samples.num_levels - 1)
        wider = int(samples.costs[larger, ids].sum())
        has_room = int(samples.tokens[larger, ids].sum()) <= samples.capacity
        if larger == level or 1 << level > spare or wider > height or not has_room:
            # This group keeps its size; a less costly one may still take the leaves.
            fixed = min(fixed, load)
            heappop(heap)
            continue
        spare -= 1 << level
        levels[pack] = larger
        heapreplace(heap, (-wider, pack))
    return min(fixed, heap[0][0]) if heap else fixed
