"""Gives every sample a context-parallel size and ranks: on a tree of ranks, or in slots where all ranks meet.

    1. A limit gives every sample its size: the smallest with room whose ranks pay at most the limit.
    2. `step`: samples go to nodes from the root down, costliest first to the node with the least loaded rank, within a
       target that halving makes the least; a sample that does not fit takes the next larger size.
    3. `microbatch`, `pipeline`: all ranks meet in a slot. The sizes in turn fill packs, dominated slots first; then
       packs of like cost make slots.
    4. `microbatch`: bands of neighbouring sizes are planned by themselves, one after another: a slot has one size.
    5. Every single size is planned as well, and the fastest plan is taken.

Here a rank is a DP×CP rank; `batch.py` has the tree and the costs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from megatron_balance.planner.batch import SizedBatch
from megatron_balance.planner.level_packing import GOOD_ENOUGH, Plan, plan_slots
from megatron_balance.planner.list_scheduling import assign_in_groups, assign_lpt
from megatron_balance.planner.objective import organ_pipe_order
from megatron_balance.planner.pipeline_packing import EFFORT, plan_pipeline
from megatron_balance.planner.problem import Ints, sums

_TOLERANCE = 2048
"""The search for a target ends within 1/2048 of the lower bound."""

_MAX_PLACED = 65536
"""Placements of samples on the tree after which the search ends; a first target that fits is always found."""

_SPLIT_PERCENTS = (30, 50, 70, 85, 100, 110, 120, 130, 150, 180, 250, 400, 600, 900)
"""Limits of a sample's cost on each rank to try, in percent of the mean time of a slot."""

_SLOT_SIXTEENTHS = (17, 18, 20, 22, 24)
"""Numbers of slots to try, in sixteenths of the smallest number."""

_SLOT_MULTIPLES = (2, 3, 4, 6, 8, 12, 16)
"""Further numbers of slots to try in a pipeline, in multiples of the smallest: more slots idle less."""

_BAND_PART = 10
"""A band's size is the smallest at which a sample takes at most a tenth of a step."""

_OUTLINES = 5
"""Most promising outlines of each number of slots, which are filled."""

_LOADS_TRIED = 4
"""Loads that each is filled to: the next makes room for the samples that found none at the one before."""

_MAX_FILLED = 32768
"""Samples filled into slots after which the search ends; the first outline is always filled."""


def plan_sizes(batch: SizedBatch) -> Plan:
    """The fastest plan, the first of equals: on the tree where ranks meet once a step, else in slots; at every size."""
    if not batch.num_samples:
        sizes = np.ones((batch.dp_cp_size, batch.multiple if batch.equal_counts else 1), dtype=np.int64)
        return Plan(np.zeros(0, dtype=np.int64), sizes)
    waiting = batch.waiting
    plans = [(_plan_in_slots if waiting.in_slots or waiting.is_makespan else _plan_on_tree)(batch)]

    def time(plan: Plan) -> int:
        return batch.time(plan.microbatch_of, plan.cp_sizes)

    bound = batch.lower_bound()
    if min(map(time, plans)) > bound + bound // GOOD_ENOUGH:
        plans += [plan for level in range(batch.num_levels) if (plan := _plan_at_size(batch, level)) is not None]
        if waiting.in_slots and not waiting.is_makespan:
            plans += _plan_in_bands(batch, limit=min(map(time, plans)))
    return min(plans, key=time)


def _plan_in_bands(batch: SizedBatch, *, limit: int) -> list[Plan]:
    """The plan in which all micro-batches of a slot have one size; none where it would not be faster than `limit`.

    Samples are cut into bands of neighbouring sizes. Each band is planned by itself at one of its sizes, one after
    another: wide packs of several long samples are more even than dominated slots, whose rest is shared for nothing.
    """
    levels = batch.levels_within(batch.min_work() // _BAND_PART)
    work, used = batch.costs << np.arange(batch.num_levels)[:, None], np.unique(levels).tolist()
    best: list[tuple[int, list[tuple[Ints, Plan]]]] = [(0, [])]  # time and bands of the smallest sizes
    for stop, highest in enumerate(used, start=1):
        # What is left takes at least its work at the smallest size.
        rest = int(batch.at(work, batch.min_levels)[levels > highest].sum()) // batch.dp_cp_size
        shortest, bands = limit - rest, list[tuple[Ints, Plan]]()
        for start, (before, lower) in enumerate(best):
            ids = np.flatnonzero((levels >= used[start]) & (levels <= highest))
            for level in used[start:stop]:
                if before + int(work[level, ids].sum()) // batch.dp_cp_size >= shortest:
                    continue
                band = batch.take(ids)
                plan = _plan_at_size(band, level)
                if plan is not None and (time := before + band.time(plan.microbatch_of, plan.cp_sizes)) < shortest:
                    shortest, bands = time, [*lower, (ids, plan)]
        best.append((shortest if bands else limit, bands))
    if not best[-1][1]:
        return []
    rank_of, slot_of = np.zeros((2, batch.num_samples), dtype=np.int64)
    sizes = np.zeros((batch.dp_cp_size, 0), dtype=np.int64)
    for ids, plan in best[-1][1]:
        rank_of[ids], slot = np.divmod(plan.microbatch_of, plan.cp_sizes.shape[1])
        slot_of[ids] = slot + sizes.shape[1]
        sizes = np.concatenate([sizes, plan.cp_sizes], axis=1)
    return [Plan(rank_of * sizes.shape[1] + slot_of, sizes)]


def _plan_at_size(batch: SizedBatch, level: int) -> Plan | None:
    """The plan in which `2**level` ranks share every micro-batch; None where samples or ranks do not divide so."""
    size = 1 << level
    if batch.dp_cp_size % size or int(batch.min_levels.max()) > level:
        return None
    replicas = batch.at_size(level)
    if replicas.num_ranks % replicas.ep_dp_size or replicas.sync_size % replicas.ep_dp_size:
        return None
    if replicas.waiting.is_makespan:
        plan = plan_pipeline(replicas, effort=EFFORT // batch.num_levels)
    else:
        plan = plan_slots(replicas)
    rank, slot = np.divmod(plan.microbatch_of, plan.cp_sizes.shape[1])
    return Plan(rank * size * plan.cp_sizes.shape[1] + slot, (plan.cp_sizes * size).repeat(size, axis=0))


def _plan_on_tree(batch: SizedBatch) -> Plan:
    """Samples on nodes so that the largest load is least, then packed node by node, slots from the root down."""
    local, floor, plans = batch.with_local_experts(), batch.min_work(), list[Plan]()
    # The number of micro-batches of a rank is not known: their fixed costs by tokens, none, or for each shared sample.
    whole, part = divmod(batch.per_microbatch, batch.cap)
    tokens = np.minimum(local.tokens, batch.cap)  # no sample pays for more than one
    by_tokens = whole * tokens + part * tokens // batch.cap
    by_sharing = np.zeros_like(by_tokens)
    by_sharing[1:] = batch.per_microbatch
    for fixed in (by_tokens, 0, by_sharing) if batch.per_microbatch else (0,):
        estimate = replace(local, costs=local.costs + fixed)
        best: tuple[Ints, Ints, int] | None = None
        low, step, num_placed = floor, floor // (4 * _TOLERANCE), 0
        while best is None or (num_placed < _MAX_PLACED and best[2] - low > max(floor // _TOLERANCE, 1)):
            target = low + step if best is None else (low + best[2]) // 2
            nodes = _nodes_within(estimate, target=target)
            num_placed += batch.num_samples
            if nodes is None:
                low, step = target, 2 * step + 1
            else:
                best = nodes
        plans.append(_pack_nodes(batch, levels=best[0], nodes=best[1]))
    return min(plans, key=lambda plan: batch.time(plan.microbatch_of, plan.cp_sizes))


def _nodes_within(batch: SizedBatch, *, target: int) -> tuple[Ints, Ints, int] | None:
    """Level and node of every sample and the largest load of a rank; None if that would exceed the target."""
    preferred = batch.levels_within(target)
    levels, nodes, loads = preferred.copy(), np.zeros_like(preferred), np.zeros(batch.dp_cp_size, dtype=np.int64)

    def assign(ids: Ints, level: int) -> int:
        """Gives samples to the nodes of a level up to the first without room; returns how many it gave."""
        num_nodes, costs = batch.dp_cp_size >> level, batch.costs[level, ids]
        node_loads = loads[: num_nodes << level].reshape(num_nodes, -1)
        top, weights = node_loads.max(axis=1), np.zeros_like(costs)
        slack, room = (target - top)[:, None], np.zeros((num_nodes, 1), dtype=np.int64)
        node = assign_lpt(
            costs, weights, slack=slack, room=room, loads=top.copy(), added=costs, within=True, stops=True
        )
        count = int((node >= 0).sum())
        nodes[ids[:count]], levels[ids[:count]] = node[:count], level
        node_loads += sums(costs[:count], node[:count], num_nodes)[:, None]
        return count

    for level in range(batch.num_levels - 1, -1, -1):
        ids = np.flatnonzero(preferred == level)
        ids = ids[np.argsort(-batch.costs[level, ids], kind="stable")]
        while (count := assign(ids, level)) < ids.size:
            # The next sample takes the smallest larger size at which some node has room.
            if not any(assign(ids[count : count + 1], larger) for larger in range(level + 1, batch.num_levels)):
                return None
            ids = ids[count + 1 :]
    return levels, nodes, int(loads.max())


def _pack_nodes(batch: SizedBatch, *, levels: Ints, nodes: Ints) -> Plan:
    """Micro-batches of every node, first fit by descending tokens, the root's first."""
    rank_of = nodes << levels
    microbatch_of, used = np.zeros(batch.num_samples, dtype=np.int64), np.zeros(batch.dp_cp_size, dtype=np.int64)
    ends: list[tuple[int, Ints]] = []
    for level in range(batch.num_levels - 1, -1, -1):
        ids = np.flatnonzero(levels == level)
        if not ids.size:
            continue
        tokens = batch.tokens[level, ids].clip(1, batch.cap)
        order = np.lexsort((-tokens, nodes[ids]))
        ids, tokens = ids[order], tokens[order]
        num_nodes = batch.dp_cp_size >> level
        # Two packs together hold more than the cap, or first fit would not have opened the second.
        width = 2 * (int(sums(tokens, nodes[ids], num_nodes).max()) // batch.cap) + 1
        room = np.full((num_nodes, width), batch.cap, dtype=np.int64)
        # First fit: the first bins have by far the most slack.
        slack = np.tile(np.arange(width, 0, -1) * (int(tokens.sum()) + 1), (num_nodes, 1))
        pack = assign_in_groups(tokens, tokens, group_of=nodes[ids], slack=slack, room=room)
        microbatch_of[ids] = used[rank_of[ids]] + pack
        counts = np.zeros(num_nodes, dtype=np.int64)
        np.maximum.at(counts, nodes[ids], pack + 1)
        used[: num_nodes << level] += counts.repeat(1 << level)
        ends.append((level, used.copy()))
    num_slots = np.maximum(used, 1)
    if batch.equal_counts:
        num_slots[:] = -(-int(num_slots.max()) // batch.multiple) * batch.multiple
    else:
        # In its last micro-batch a rank reduces gradients, while others still exchange keys and values: ranks that end
        # with a node's last micro-batch get a dummy where other ranks of the node have more.
        for level, end in ends:
            reach = num_slots.size >> level << level
            largest = num_slots[:reach].reshape(-1, 1 << level).max(axis=1).repeat(1 << level)
            num_slots[:reach] += (num_slots[:reach] == end[:reach]) & (largest > end[:reach])
    return _sized_plan(rank_of, microbatch_of, levels=levels, num_slots=num_slots)


def _sized_plan(rank_of: Ints, microbatch_of: Ints, *, levels: Ints, num_slots: Ints) -> Plan:
    """The plan of samples with a first rank, a slot and a level each, `[num_samples]`. `num_slots`: `[dp_cp_size]`."""
    largest = int(num_slots.max())
    sizes = (np.arange(largest) < num_slots[:, None]).astype(np.int64)
    for level in np.unique(levels[levels > 0]).tolist():
        shared = levels == level
        sizes[rank_of[shared, None] + np.arange(1 << level), microbatch_of[shared, None]] = 1 << level
    return Plan(rank_of * largest + microbatch_of, sizes)


class _Outline(NamedTuple):
    """An estimate of slots that treats samples as divisible."""

    time: int  # sum of the times of slots, fixed costs included, plus the idle time of a pipeline
    num_slots: int
    limit: int  # cost on each rank above which a sample is shared by more ranks
    load: int  # of the slots without a costlier sample


def _plan_in_slots(batch: SizedBatch) -> Plan:
    """The fastest of the most promising outlines, filled: the least sum of slot times, or the least makespan."""
    best: tuple[int, Plan] | None = None
    # Expert work evens out over the ranks that share it.
    waiting, num_filled, local = batch.waiting, 0, batch.with_local_experts()
    for outline in _outlines(local):
        if best is not None and (outline.time >= waiting.pipeline.num_stages * best[0] or num_filled >= _MAX_FILLED):
            break
        load = outline.load
        for _ in range(_LOADS_TRIED):
            num_filled += batch.num_samples
            packs, excess = _fill(local, outline, load=load)
            plan = _shelve(batch, packs)
            times: Ints = batch.kind_grids(plan.microbatch_of, plan.cp_sizes).max(axis=1)
            order = np.arange(plan.cp_sizes.shape[1], dtype=np.int64)
            if waiting.is_makespan:
                order: Ints = organ_pipe_order(times.sum(axis=0)[None])[0]
            time = int(waiting.times(times[None, :, order])[0])
            if best is None or time < best[0]:
                rank, slot = np.divmod(plan.microbatch_of, order.size)
                best = time, Plan(rank * order.size + np.argsort(order)[slot], plan.cp_sizes[:, order])
            if not excess:
                break
            load += max(excess // (outline.num_slots * batch.dp_cp_size), load // 256) + 1
    assert best is not None, "there is an outline for any samples"
    return best[1]


def _outlines(batch: SizedBatch) -> list[_Outline]:
    """Numbers of slots and limits to try, the most promising first."""
    smallest = -(-batch.min_slots // batch.multiple)
    numbers = set(range(smallest, smallest + 6)) | {-(-smallest * sixteenths // 16) for sixteenths in _SLOT_SIXTEENTHS}
    if batch.waiting.is_makespan:
        numbers |= {smallest * factor for factor in _SLOT_MULTIPLES}
    floor = batch.min_work()
    outlines: list[_Outline] = []
    for num_slots in sorted(number * batch.multiple for number in numbers):
        limits = (percent * floor // (100 * num_slots) for percent in _SPLIT_PERCENTS)
        by_time = {outline.time: outline for outline in (_outline(batch, num_slots, limit=limit) for limit in limits)}
        outlines += [by_time[time] for time in sorted(by_time)[:_OUTLINES]]
    return sorted(outlines)


def _outline(batch: SizedBatch, num_slots: int, *, limit: int) -> _Outline:
    """Lowers the load of ordinary slots to what costlier samples, and what fills their slots, do not hold."""
    levels = batch.levels_within(limit)
    costs, tokens = batch.at(batch.costs, levels), batch.at(batch.tokens, levels)
    order = np.argsort(-costs, kind="stable")
    costs, tokens, widths = costs[order], tokens[order], 1 << levels[order]
    ends, areas = np.cumsum(widths), np.cumsum(costs * widths)
    total, ranks = int(areas[-1]), batch.dp_cp_size
    load = total // (num_slots * ranks)
    while True:
        num_dominant = int(np.searchsorted(-costs, -load))
        num_dominated = -(-int(ends[num_dominant - 1]) // ranks) if num_dominant else 0
        tops = costs[np.searchsorted(ends, np.arange(num_dominated) * ranks, side="right")]
        area = int(areas[num_dominant - 1]) if num_dominant else 0
        spare = num_dominated * ranks - int(ends[num_dominant - 1]) if num_dominant else 0
        if spare and num_dominant < costs.size:
            by_tokens = batch.cap * int(costs[num_dominant]) // max(int(tokens[num_dominant]), 1)
            area += spare * min(int(tops[-1]), by_tokens)
        low = num_slots - num_dominated
        lower = max(total - area, 0) // (low * ranks) if low > 0 else load
        if lower >= load - load // 1024:
            break
        load = lower
    # Slots that dominant samples need beyond the number are added.
    count = max(num_slots, num_dominated)
    pipeline = batch.waiting.pipeline
    idle = (pipeline.num_stages - 1) * (load + batch.per_microbatch) // pipeline.num_chunks
    time = int(tops.sum()) + max(low, 0) * load + count * batch.per_microbatch + idle
    return _Outline(time, num_slots=num_slots, limit=limit, load=load + load // 512)


@dataclass(eq=False)
class _Packs:
    """Micro-batches that are filled, in slots of given loads."""

    batch: SizedBatch
    levels: Ints  # [num_packs] log2 of the ranks that share a pack
    slack: Ints  # [num_packs] cost that a pack may still take on each of its ranks
    room: Ints  # [num_packs] tokens that it may still take on each of them
    pack_of: Ints  # [num_samples] -1 until a sample is assigned
    slot_loads: Ints  # [num_slots] cost that packs of a slot may reach
    spare: Ints  # [num_slots] its ranks without a pack
    load: int  # of slots that are added

    def add_slots(self, count: int) -> None:
        """Adds empty slots."""
        self.slot_loads = np.concatenate([self.slot_loads, np.full(count, self.load, dtype=np.int64)])
        self.spare = np.concatenate([self.spare, np.full(count, self.batch.dp_cp_size, dtype=np.int64)])

    def open(self, level: int, count: int) -> bool:
        """Opens up to `count` packs on the free ranks of the first slots; False where there are none."""
        available = self.spare >> level
        opened = np.clip(count - (np.cumsum(available) - available), 0, available)
        self.spare -= opened << level
        new = self.slot_loads.repeat(opened)
        self.levels = np.concatenate([self.levels, np.full_like(new, level)])
        self.slack = np.concatenate([self.slack, new])
        self.room = np.concatenate([self.room, np.full_like(new, self.batch.cap)])
        return new.size > 0

    def assign(self, ids: Ints, level: int) -> Ints:
        """Gives samples, costliest first, to the packs of a level; returns those without room."""
        packs = np.flatnonzero(self.levels == level)
        if not packs.size or not ids.size:
            return ids
        costs, weights = self.batch.costs[level, ids], self.batch.tokens[level, ids]
        slack, room = self.slack[packs, None], self.room[packs, None]
        index = assign_lpt(costs, weights, slack=slack, room=room, loads=-slack[:, 0], added=costs, within=True)
        self.slack[packs], self.room[packs] = slack[:, 0], room[:, 0]
        self.pack_of[ids[index >= 0]] = packs[index[index >= 0]]
        return ids[index < 0]

    def num_required(self, ids: Ints, level: int) -> int:
        """Packs of a level that samples fill."""
        costs, tokens = (int(table[level, ids].sum()) for table in (self.batch.costs, self.batch.tokens))
        return max(-(-costs // max(self.load, 1)), -(-tokens // self.batch.cap), int(ids.size > 0))


def _fill(batch: SizedBatch, outline: _Outline, *, load: int) -> tuple[_Packs, int]:
    """Packs for all samples, in dominated slots up to their dominant sample, else of `load`; and the work beyond."""
    levels = batch.levels_within(outline.limit)
    costs, tokens = batch.at(batch.costs, levels), batch.at(batch.tokens, levels)
    high = np.flatnonzero((costs > load) | (tokens > batch.cap))
    high = high[np.lexsort((-levels[high], -costs[high]))]
    slot_of, tops, spare = _first_fit(costs[high], levels[high], dp_cp_size=batch.dp_cp_size)
    pack_of = np.full(batch.num_samples, -1, dtype=np.int64)
    pack_of[high] = np.arange(high.size)
    room = np.where(tokens[high] > batch.cap, -1, batch.cap - tokens[high])
    packs = _Packs(batch, levels[high], tops[slot_of] - costs[high], room, pack_of, tops, spare, load)
    packs.add_slots(max(outline.num_slots - tops.size, 0))
    excess = 0
    for level in range(batch.num_levels - 1, -1, -1):
        ids = np.flatnonzero((levels == level) & (pack_of < 0))
        ids = ids[np.argsort(-costs[ids], kind="stable")]
        if not level:
            packs.open(0, batch.dp_cp_size * packs.spare.size)
        ids = packs.assign(ids, level)
        while ids.size:
            if packs.open(level, packs.num_required(ids, level)):
                ids = packs.assign(ids, level)
                continue
            for larger in range(level + 1, batch.num_levels):
                ids = packs.assign(ids, larger)
            excess += int((batch.costs[level, ids] << level).sum())
            packs.add_slots(-(-(packs.num_required(ids, level) << level) // batch.dp_cp_size))
    return packs, excess


def _shelve(batch: SizedBatch, packs: _Packs) -> Plan:
    """Packs by descending cost into the first slot with room, as in strip packing."""
    levels, pack_of = packs.levels, packs.pack_of
    loads = sums(batch.at(batch.costs, levels[pack_of]), pack_of, levels.size)
    counts = np.bincount(pack_of, minlength=levels.size)
    order = np.flatnonzero(counts)
    order = order[np.lexsort((-levels[order], -loads[order]))]
    slot_of, _, spare = _first_fit(loads[order], levels[order], dp_cp_size=batch.dp_cp_size)
    slots, ranks = np.zeros((2, levels.size), dtype=np.int64)
    for slot in range(spare.size):
        members = order[slot_of == slot]
        # The largest first, so that each starts at a multiple of its size.
        by_size = members[np.lexsort((members, -levels[members]))]
        slots[members], ranks[by_size] = slot, np.cumsum(1 << levels[by_size]) - (1 << levels[by_size])
    num_slots = np.full(batch.dp_cp_size, -(-spare.size // batch.multiple) * batch.multiple)
    return _sized_plan(ranks[pack_of], slots[pack_of], levels=levels[pack_of], num_slots=num_slots)


def _first_fit(costs: Ints, levels: Ints, *, dp_cp_size: int) -> tuple[Ints, Ints, Ints]:
    """Slots of packs that come by descending cost: the slot of each; of each slot its time and its free ranks."""
    slot_of: list[int] = []
    times: list[int] = []
    spare: list[int] = []
    first_open = 0
    for cost, level in zip(costs.tolist(), levels.tolist(), strict=True):
        while first_open < len(spare) and not spare[first_open]:
            first_open += 1
        slot = next((slot for slot in range(first_open, len(spare)) if spare[slot] >> level), len(spare))
        if slot == len(spare):
            times.append(cost)
            spare.append(dp_cp_size)
        spare[slot] -= 1 << level
        slot_of.append(slot)
    return np.array(slot_of, dtype=np.int64), np.array(times, dtype=np.int64), np.array(spare, dtype=np.int64)
