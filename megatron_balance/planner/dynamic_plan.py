"""Gives every sample a context-parallel size and leaves: on a tree of ranks, or in rows where all ranks meet.

Both pour samples with the planner's one primitive (`plan.pour`), once for each size; `dynamic_cp.py` has the steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

import numpy as np

from megatron_balance.planner.batch import Batch, Plan, sums
from megatron_balance.planner.dynamic_cp import SizedBatch
from megatron_balance.planner.fixed_ranks import pour_each
from megatron_balance.planner.inputs import Ints
from megatron_balance.planner.pipeline_plan import EFFORT, plan_pipeline
from megatron_balance.planner.plan import GOOD_ENOUGH, plan, pour
from megatron_balance.planner.times import organ_pipe_order

TOLERANCE = 2048
"""The search for a target ends within one part in this many of the lower bound."""

MAX_PLACED = 65536
"""Placements of samples on the tree after which the search ends; a first target that fits is always found."""

LIMITS = (30, 50, 70, 85, 100, 110, 120, 130, 150, 180, 250, 400, 600, 900)
"""Limits of a sample's cost on each rank to try, in percent of the mean height of a row."""

MORE_ROWS = (17, 18, 20, 22, 24)
"""Numbers of rows to try, in sixteenths of the least number."""

PIPELINE_ROWS = (2, 3, 4, 6, 8, 12, 16)
"""Further numbers of rows to try in a pipeline, in multiples of the least: more rows idle less."""

OUTLINES = 5
"""Most promising outlines of each number of rows, which are filled."""

HEIGHTS = 4
"""Heights that each is filled to: the next makes room for what was left at the one before."""

MAX_FILLED = 65536
"""Samples filled into rows after which the search ends, of each view; the first outline is always filled."""


def plan_sizes(batch: SizedBatch) -> Plan:
    """Plans on the tree where leaves meet once a step, in rows where in every slot, and at every single size.

    The fastest is taken, the first of equals; a pipeline is planned both ways.
    """
    if not batch.num_samples:
        sizes = np.ones((batch.dp_cp_size, batch.multiple if batch.even else 1), dtype=np.int64)
        return Plan(np.zeros(0, dtype=np.int64), sizes)
    waiting = batch.waiting
    plans = [plan_in_rows(batch)] if waiting.in_slots or waiting.is_makespan else []
    plans += [plan_on_tree(batch)] if not waiting.in_slots else []

    def time(plan: Plan) -> int:
        return batch.time(plan.microbatch_of, plan.cp_sizes)

    bound = batch.lower_bound()
    if min(map(time, plans)) > bound + bound // GOOD_ENOUGH:
        plans += [plan for level in range(batch.num_levels) if (plan := plan_at_size(batch, level)) is not None]
    return min(plans, key=time)


def plan_at_size(batch: SizedBatch, level: int) -> Plan | None:
    """The plan in which `2**level` leaves share every micro-batch; None where samples or leaves do not divide so."""
    size = 1 << level
    if batch.dp_cp_size % size or int(batch.least_levels.max()) > level:
        return None
    span = max(batch.waiting.span // size, 1)
    replicas = Batch(
        batch.costs[level][None],
        shared=-(-batch.shared[level] // size),
        weights=np.minimum(batch.tokens[level], batch.cap + 1),
        cap=batch.cap,
        num_ranks=batch.dp_cp_size // size,
        waiting=replace(batch.waiting, span=span),
        expert_span=max(batch.expert_span // size, 1),
        launch=batch.launch,
        multiple=batch.multiple if batch.even else 1,
    )
    if replicas.num_ranks % replicas.expert_span or span % replicas.expert_span:
        return None
    if replicas.waiting.is_makespan:
        found = plan_pipeline(replicas, effort=EFFORT // batch.num_levels)
    else:
        found = plan(replicas)
    rank, slot = np.divmod(found.microbatch_of, found.cp_sizes.shape[1])
    return Plan(rank * size * found.cp_sizes.shape[1] + slot, (found.cp_sizes * size).repeat(size, axis=0))


def plan_on_tree(batch: SizedBatch) -> Plan:
    """Samples on nodes so that the fullest leaf is least, then packed node by node, slots from the root down.

    All leaves of a node have the same ancestors, so they reach its micro-batches in the same slot and at the same time:
    no rank waits inside a micro-batch.
    """
    own, floor, plans = batch.with_experts_as_own(), batch.least_work(), list[Plan]()
    # How many micro-batches a leaf will have is not known: their fixed costs by tokens, none, or one a shared sample.
    whole, part = divmod(batch.launch, batch.cap)
    by_tokens = whole * own.tokens + part * own.tokens // batch.cap
    of_shared = np.zeros_like(by_tokens)
    of_shared[1:] = batch.launch
    for fixed in (by_tokens, 0, of_shared) if batch.launch else (0,):
        estimate = replace(own, costs=own.costs + fixed)
        best: tuple[Ints, Ints, int] | None = None
        low, step, placed = floor, floor // (4 * TOLERANCE), 0
        while best is None or (placed < MAX_PLACED and best[2] - low > max(floor // TOLERANCE, 1)):
            target = low + step if best is None else (low + best[2]) // 2
            found = _nodes_within(estimate, target=target)
            placed += batch.num_samples
            if found is None:
                low, step = target, 2 * step + 1
            else:
                best = found
        plans.append(_pack_nodes(batch, levels=best[0], nodes=best[1]))
    return min(plans, key=lambda plan: batch.time(plan.microbatch_of, plan.cp_sizes))


def _nodes_within(batch: SizedBatch, *, target: int) -> tuple[Ints, Ints, int] | None:
    """Level and node of every sample and the cost of the fullest leaf; None if that would exceed the target."""
    wanted = batch.levels_within(target)
    levels, nodes, loads = wanted.copy(), np.zeros_like(wanted), np.zeros(batch.dp_cp_size, dtype=np.int64)

    def place(ids: Ints, level: int) -> int:
        """Pours samples into the nodes of a level up to the first that finds no room; returns how many it placed."""
        num_nodes, costs = batch.dp_cp_size >> level, batch.costs[level, ids]
        of_nodes = loads[: num_nodes << level].reshape(num_nodes, -1)
        fullest, free = of_nodes.max(axis=1), np.zeros((num_nodes, 1), dtype=np.int64)
        slack, none = (target - fullest)[:, None], np.zeros_like(costs)
        found = pour(costs, none, slack=slack, room=free, loads=fullest.copy(), added=costs, within=True, stops=True)
        count = int((found >= 0).sum())
        nodes[ids[:count]], levels[ids[:count]] = found[:count], level
        of_nodes += sums(costs[:count], found[:count], num_nodes)[:, None]
        return count

    for level in range(batch.num_levels - 1, -1, -1):
        ids = np.flatnonzero(wanted == level)
        ids = ids[np.argsort(-batch.costs[level, ids], kind="stable")]
        while (count := place(ids, level)) < ids.size:
            # The next one takes the smallest larger size at which some node has room.
            if not any(place(ids[count : count + 1], larger) for larger in range(level + 1, batch.num_levels)):
                return None
            ids = ids[count + 1 :]
    return levels, nodes, int(loads.max())


def _pack_nodes(batch: SizedBatch, *, levels: Ints, nodes: Ints) -> Plan:
    """Micro-batches of every node, first fit by falling tokens, the root's first."""
    leaf_of = nodes << levels
    microbatch_of, filled = np.zeros(batch.num_samples, dtype=np.int64), np.zeros(batch.dp_cp_size, dtype=np.int64)
    ends: list[tuple[int, Ints]] = []
    for level in range(batch.num_levels - 1, -1, -1):
        ids = np.flatnonzero(levels == level)
        if not ids.size:
            continue
        held = batch.tokens[level, ids].clip(1, batch.cap)
        order = np.lexsort((-held, nodes[ids]))
        ids, held = ids[order], held[order]
        num_nodes = batch.dp_cp_size >> level
        # Two packs together hold more than the cap, or first fit would not have opened the second.
        width = 2 * (int(sums(held, nodes[ids], num_nodes).max()) // batch.cap) + 1
        room = np.full((num_nodes, width), batch.cap, dtype=np.int64)
        # First fit: the first bins have by far the most slack.
        slack = np.tile(np.arange(width, 0, -1) * (int(held.sum()) + 1), (num_nodes, 1))
        pack = pour_each(held, held, group_of=nodes[ids], slack=slack, room=room)
        microbatch_of[ids] = filled[leaf_of[ids]] + pack
        counts = np.zeros(num_nodes, dtype=np.int64)
        np.maximum.at(counts, nodes[ids], pack + 1)
        filled[: num_nodes << level] += counts.repeat(1 << level)
        ends.append((level, filled.copy()))
    num_slots = np.maximum(filled, 1)
    if batch.even:
        num_slots[:] = -(-int(num_slots.max()) // batch.multiple) * batch.multiple
    else:
        # In its last micro-batch a rank reduces gradients, while others still exchange keys and values: leaves that end
        # with a node's last micro-batch get a dummy where other leaves of the node have more.
        for level, end in ends:
            reach = num_slots.size >> level << level
            most = num_slots[:reach].reshape(-1, 1 << level).max(axis=1).repeat(1 << level)
            num_slots[:reach] += (num_slots[:reach] == end[:reach]) & (most > end[:reach])
    return _sized_plan(leaf_of, microbatch_of, levels=levels, num_slots=num_slots)


def _sized_plan(leaf_of: Ints, microbatch_of: Ints, *, levels: Ints, num_slots: Ints) -> Plan:
    """The plan of samples with a first leaf, a slot and a level each, `[num_samples]`. `num_slots`: `[dp_cp_size]`."""
    most = int(num_slots.max())
    sizes = (np.arange(most) < num_slots[:, None]).astype(np.int64)
    for level in np.unique(levels[levels > 0]).tolist():
        here = levels == level
        sizes[leaf_of[here, None] + np.arange(1 << level), microbatch_of[here, None]] = 1 << level
    return Plan(leaf_of * most + microbatch_of, sizes)


class Outline(NamedTuple):
    """An estimate of rows that treats samples as divisible."""

    time: int  # sum of the heights of rows, fixed costs included, plus the idle time of a pipeline
    num_rows: int
    limit: int  # cost on each rank above which a sample is shared by more ranks
    height: int  # of the rows without a costlier sample


def plan_in_rows(batch: SizedBatch) -> Plan:
    """The fastest of the most promising outlines, filled: the least sum of heights, or the least makespan."""
    best: tuple[int, Plan] | None = None
    where, filled = batch.waiting, 0
    # What experts do evens out over the ranks that share it, as far as samples allow: each sample's own is tried too.
    views = [batch, batch.with_experts_as_own()] if batch.shared.any() else [batch]
    for outline, view in sorted((outline, number) for number, one in enumerate(views) for outline in outlines(one)):
        if best is not None and (
            outline.time >= where.pipeline.num_stages * best[0] or filled >= MAX_FILLED * len(views)
        ):
            break
        height = outline.height
        for _ in range(HEIGHTS):
            filled += batch.num_samples
            packs, left = fill(views[view], outline, height=height)
            plan = shelve(batch, packs)
            heights = batch.cost_grid(plan.microbatch_of, plan.cp_sizes).max(axis=0, keepdims=True)
            order = organ_pipe_order(heights) if where.is_makespan else np.arange(heights.size)[None]
            time = int(where.times(heights[:, order[0]])[0])
            if best is None or time < best[0]:
                leaf, row = np.divmod(plan.microbatch_of, order.size)
                microbatch_of = leaf * order.size + np.argsort(order[0])[row]
                best = time, Plan(microbatch_of, plan.cp_sizes[:, order[0]])
            if not left:
                break
            height += max(left // (outline.num_rows * batch.dp_cp_size), height // 256) + 1
    assert best is not None, "there is an outline for any samples"
    return best[1]


def outlines(batch: SizedBatch) -> list[Outline]:
    """Numbers of rows and limits to try, the most promising first."""
    least = -(-batch.least_rows // batch.multiple)
    numbers = set(range(least, least + 6)) | {-(-least * sixteenths // 16) for sixteenths in MORE_ROWS}
    if batch.waiting.is_makespan:
        numbers |= {least * more for more in PIPELINE_ROWS}
    floor = replace(batch, shared=np.zeros_like(batch.shared)).least_work()
    found: list[Outline] = []
    for num_rows in sorted(number * batch.multiple for number in numbers):
        limits = (percent * floor // (100 * num_rows) for percent in LIMITS)
        of_rows = {outline.time: outline for outline in (_outline(batch, num_rows, limit=limit) for limit in limits)}
        found += [of_rows[time] for time in sorted(of_rows)[:OUTLINES]]
    return sorted(found)


def _outline(batch: SizedBatch, num_rows: int, *, limit: int) -> Outline:
    """Lowers the height of ordinary rows to what samples costlier than that, and what fits beside them, leave."""
    levels = batch.levels_within(limit)
    costs, tokens = batch.at(batch.costs, levels), batch.at(batch.tokens, levels)
    order = np.argsort(-costs, kind="stable")
    costs, tokens, widths = costs[order], tokens[order], 1 << levels[order]
    ends, areas = np.cumsum(widths), np.cumsum(costs * widths)
    total, leaves = int(areas[-1]), batch.dp_cp_size
    height = total // (num_rows * leaves)
    while True:
        num_high = int(np.searchsorted(-costs, -height))
        rows_needed = -(-int(ends[num_high - 1]) // leaves) if num_high else 0
        tops = costs[np.searchsorted(ends, np.arange(rows_needed) * leaves, side="right")]
        held = int(areas[num_high - 1]) if num_high else 0
        spare = rows_needed * leaves - int(ends[num_high - 1]) if num_high else 0
        if spare and num_high < costs.size:
            by_tokens = batch.cap * int(costs[num_high]) // max(int(tokens[num_high]), 1)
            held += spare * min(int(tops[-1]), by_tokens)
        low = num_rows - rows_needed
        lower = max(total - held, 0) // (low * leaves) if low > 0 else height
        if lower >= height - height // 1024:
            break
        height = lower
    # Rows that high samples need beyond their number are added.
    count = max(num_rows, rows_needed)
    pipeline = batch.waiting.pipeline
    idle = (pipeline.num_stages - 1) * (height + batch.launch) // pipeline.num_chunks
    time = int(tops.sum()) + max(low, 0) * height + count * batch.launch + idle + batch.even_shared
    return Outline(time, num_rows=num_rows, limit=limit, height=height + height // 512)


@dataclass(eq=False)
class Packs:
    """Micro-batches being filled, in rows of given heights."""

    batch: SizedBatch
    levels: Ints  # [num_packs] log2 of the ranks that share a pack
    slack: Ints  # [num_packs] cost that a pack may still take on each of its ranks
    room: Ints  # [num_packs] tokens that it may still take on each of them
    pack_of: Ints  # [num_samples] -1 until a sample is placed
    heights: Ints  # [num_rows] cost that packs of a row may reach
    spare: Ints  # [num_rows] its leaves without a pack
    height: int  # of rows that are added

    def add_rows(self, count: int) -> None:
        """Adds empty rows."""
        self.heights = np.concatenate([self.heights, np.full(count, self.height, dtype=np.int64)])
        self.spare = np.concatenate([self.spare, np.full(count, self.batch.dp_cp_size, dtype=np.int64)])

    def open(self, level: int, wanted: int) -> bool:
        """Opens up to as many packs on the free leaves of the first rows; False where there are none."""
        available = self.spare >> level
        taken = np.clip(wanted - (np.cumsum(available) - available), 0, available)
        self.spare -= taken << level
        new = self.heights.repeat(taken)
        self.levels = np.concatenate([self.levels, np.full_like(new, level)])
        self.slack = np.concatenate([self.slack, new])
        self.room = np.concatenate([self.room, np.full_like(new, self.batch.cap)])
        return new.size > 0

    def pour(self, ids: Ints, level: int) -> Ints:
        """Pours samples, costliest first, into the packs of a level; returns those without room."""
        packs = np.flatnonzero(self.levels == level)
        if not packs.size or not ids.size:
            return ids
        costs, weights = self.batch.costs[level, ids], self.batch.tokens[level, ids]
        slack, room = self.slack[packs, None], self.room[packs, None]
        found = pour(costs, weights, slack=slack, room=room, loads=-slack[:, 0], added=costs, within=True)
        self.slack[packs], self.room[packs] = slack[:, 0], room[:, 0]
        self.pack_of[ids[found >= 0]] = packs[found[found >= 0]]
        return ids[found < 0]

    def needed(self, ids: Ints, level: int) -> int:
        """Packs of a level that samples fill."""
        costs, tokens = (int(table[level, ids].sum()) for table in (self.batch.costs, self.batch.tokens))
        return max(-(-costs // max(self.height, 1)), -(-tokens // self.batch.cap), int(ids.size > 0))


def fill(batch: SizedBatch, outline: Outline, *, height: int) -> tuple[Packs, int]:
    """Packs for all samples: beside giants as high as these, else of `height`; and the work that needed more rows."""
    levels = batch.levels_within(outline.limit)
    costs, tokens = batch.at(batch.costs, levels), batch.at(batch.tokens, levels)
    high = np.flatnonzero((costs > height) | (tokens > batch.cap))
    high = high[np.lexsort((-levels[high], -costs[high]))]
    row_of, tops, spare = _first_fit(costs[high], levels[high], dp_cp_size=batch.dp_cp_size)
    pack_of = np.full(batch.num_samples, -1, dtype=np.int64)
    pack_of[high] = np.arange(high.size)
    room = np.where(tokens[high] > batch.cap, -1, batch.cap - tokens[high])
    packs = Packs(batch, levels[high], tops[row_of] - costs[high], room, pack_of, tops, spare, height)
    packs.add_rows(max(outline.num_rows - tops.size, 0))
    left = 0
    for level in range(batch.num_levels - 1, -1, -1):
        ids = np.flatnonzero((levels == level) & (pack_of < 0))
        ids = ids[np.argsort(-costs[ids], kind="stable")]
        if not level:
            packs.open(0, batch.dp_cp_size * packs.spare.size)
        ids = packs.pour(ids, level)
        while ids.size:
            if packs.open(level, packs.needed(ids, level)):
                ids = packs.pour(ids, level)
                continue
            for larger in range(level + 1, batch.num_levels):
                ids = packs.pour(ids, larger)
            left += int((batch.costs[level, ids] << level).sum())
            packs.add_rows(-(-(packs.needed(ids, level) << level) // batch.dp_cp_size))
    return packs, left


def shelve(batch: SizedBatch, packs: Packs) -> Plan:
    """Packs by falling cost into the first row with room, as in strip packing with shelves; like stand with like.

    Free leaves of a row join its costliest packs: this lowers the row and avoids dummies.
    """
    levels, pack_of = packs.levels.copy(), packs.pack_of
    loads = sums(batch.at(batch.costs, levels[pack_of]), pack_of, levels.size)
    counts = np.bincount(pack_of, minlength=levels.size)
    order = np.flatnonzero(counts)
    order = order[np.lexsort((-levels[order], -loads[order]))]
    row_of, _, spare = _first_fit(loads[order], levels[order], dp_cp_size=batch.dp_cp_size)
    rows, leaves = np.zeros((2, levels.size), dtype=np.int64)
    samples = np.split(np.argsort(pack_of, kind="stable"), np.cumsum(counts)[:-1])
    for row, free in enumerate(spare.tolist()):
        of_row = order[row_of == row]
        _widen(batch, samples, of_row.tolist(), loads=loads, levels=levels, spare=free)
        # The largest first, so that each starts at a multiple of its size.
        by_size = of_row[np.lexsort((of_row, -levels[of_row]))]
        rows[of_row], leaves[by_size] = row, np.cumsum(1 << levels[by_size]) - (1 << levels[by_size])
    num_slots = np.full(batch.dp_cp_size, -(-spare.size // batch.multiple) * batch.multiple)
    return _sized_plan(leaves[pack_of], rows[pack_of], levels=levels[pack_of], num_slots=num_slots)


def _widen(batch: SizedBatch, samples: list[Ints], packs: list[int], *, loads: Ints, levels: Ints, spare: int) -> None:
    """Doubles the costliest packs of a row, while it has free leaves and that makes the row no higher.

    `samples` are the ids of each pack, `loads` their cost; `levels` are changed in place.
    """
    heap = [(-int(loads[pack]), pack) for pack in packs]
    heapify(heap)
    fixed = 0
    while spare and heap:
        load, pack = -heap[0][0], heap[0][1]
        level, ids = int(levels[pack]), samples[pack]
        larger = min(level + 1, batch.num_levels - 1)
        wider = int(batch.costs[larger, ids].sum())
        has_room = int(batch.tokens[larger, ids].sum()) <= batch.cap
        if larger == level or 1 << level > spare or wider > max(fixed, load) or not has_room:
            # This pack keeps its size; a less costly one may still take the leaves.
            fixed = max(fixed, load)
            heappop(heap)
            continue
        spare -= 1 << level
        levels[pack] = larger
        heapreplace(heap, (-wider, pack))


def _first_fit(costs: Ints, levels: Ints, *, dp_cp_size: int) -> tuple[Ints, Ints, Ints]:
    """Rows of packs that come by falling cost: the row of each, the height of each row and the leaves it has left."""
    row_of: list[int] = []
    heights: list[int] = []
    spare: list[int] = []
    first_open = 0
    for cost, level in zip(costs.tolist(), levels.tolist(), strict=True):
        while first_open < len(spare) and not spare[first_open]:
            first_open += 1
        row = next((row for row in range(first_open, len(spare)) if spare[row] >> level), len(spare))
        if row == len(spare):
            heights.append(cost)
            spare.append(dp_cp_size)
        spare[row] -= 1 << level
        row_of.append(row)
    return np.array(row_of, dtype=np.int64), np.array(heights, dtype=np.int64), np.array(spare, dtype=np.int64)
