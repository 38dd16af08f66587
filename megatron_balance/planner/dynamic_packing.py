"""Gives every sample a context-parallel size and ranks: on a tree of ranks, or in slots where all ranks meet.

    1. A limit gives every sample its size: the smallest with room whose ranks pay at most the limit.
    2. `step`: samples go to nodes from the root down, costliest first to the node with the least loaded rank, within a
       target that halving makes the least; a sample that does not fit takes the next larger size.
    3. `microbatch`, `pipeline`: all ranks meet in a slot. The sizes in turn fill packs, dominated slots first; then
       packs of like cost make slots.
    4. Every single size is planned as well, and in `microbatch` one size for long samples and one for short ones, one
       after another. The fastest plan is taken.

Here a rank is a DP×CP rank; `batch.py` has the tree and the costs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_balance.planner.batch import SizedBatch
from megatron_balance.planner.level_packing import Plan, plan_slots
from megatron_balance.planner.list_scheduling import assign_in_groups, assign_lpt
from megatron_balance.planner.objective import organ_pipe_order
from megatron_balance.planner.pipeline_packing import EFFORT, plan_pipeline
from megatron_balance.planner.problem import Ints, sums

_TOLERANCE = 2048
"""The search for a target ends within 1/2048 of the lower bound."""

_SPLIT_PERCENTS = (30, 50, 70, 85, 100, 110, 120, 130, 150, 180, 250, 400, 600, 900)
"""Limits of a sample's cost on each rank to try, in percent of the mean time of a slot."""

_SLOT_SIXTEENTHS = (16, 17, 18, 20, 22, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of slots to try, in sixteenths of the smallest number: more slots idle less in a pipeline."""

_LONG_PART = 10
"""Long and short samples are told apart by the smallest size at which a sample takes at most a tenth of a step."""

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
    plan = (_plan_in_slots if waiting.in_slots or waiting.is_makespan else _plan_on_tree)(batch)
    plan = _plan_at_any_size(batch, limit=_time(batch, plan)) or plan
    if waiting.in_slots and not waiting.is_makespan:
        levels = batch.levels_within(batch.min_work() // _LONG_PART)
        for level in np.unique(levels)[1:].tolist():
            plan = _plan_in_turn(batch, levels >= level, limit=_time(batch, plan)) or plan
    return plan


def _time(batch: SizedBatch, plan: Plan) -> int:
    return batch.time(plan.microbatch_of, plan.cp_sizes)


def _plan_at_any_size(batch: SizedBatch, *, limit: int) -> Plan | None:
    """The fastest plan at one size; None where none is faster than `limit`."""
    best = None
    for level in range(batch.num_levels):
        work = int(batch.costs[level].sum() << level) // batch.dp_cp_size
        if batch.waiting.at_least(work, empty=0) < limit:
            plan = _plan_at_size(batch, level)
            if plan is not None and _time(batch, plan) < limit:
                best, limit = plan, _time(batch, plan)
    return best


def _plan_in_turn(batch: SizedBatch, is_long: NDArray[np.bool_], *, limit: int) -> Plan | None:
    """First long samples at one size, then the others at another; None where that is not faster than `limit`.

    Wide packs of several long samples are more even than dominated slots, whose rest is shared for nothing.
    """
    rank_of, slot_of = np.zeros((2, batch.num_samples), dtype=np.int64)
    sizes = np.zeros((batch.dp_cp_size, 0), dtype=np.int64)
    for ids in (np.flatnonzero(is_long), np.flatnonzero(~is_long)):
        part = batch.take(ids)
        plan = _plan_at_any_size(part, limit=limit)
        if plan is None:
            return None
        limit -= _time(part, plan)
        rank_of[ids], slot = np.divmod(plan.microbatch_of, plan.cp_sizes.shape[1])
        slot_of[ids] = slot + sizes.shape[1]
        sizes = np.concatenate([sizes, plan.cp_sizes], axis=1)
    return Plan(rank_of * sizes.shape[1] + slot_of, sizes)


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
    local, low = batch.with_local_experts(), batch.min_work()
    # The number of micro-batches of a rank is not known: a sample pays for a part of one, by its tokens.
    local = replace(local, costs=local.costs + batch.per_microbatch * np.minimum(local.tokens, batch.cap) // batch.cap)
    high = low + low // _TOLERANCE
    while (best := _nodes_within(local, target=high)) is None:
        high = 2 * high - low + 1
    while high - low > max(low // _TOLERANCE, 1):
        middle = (low + high) // 2
        nodes = _nodes_within(local, target=middle)
        low, high, best = (middle, high, best) if nodes is None else (low, middle, nodes)
    return _pack_nodes(batch, levels=best[0], nodes=best[1])


def _nodes_within(batch: SizedBatch, *, target: int) -> tuple[Ints, Ints] | None:
    """Level and node of every sample; None if the load of a rank would exceed the target."""
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
    return levels, nodes


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
    numbers = {*range(smallest, smallest + 6), *(-(-smallest * sixteenths // 16) for sixteenths in _SLOT_SIXTEENTHS)}
    floor = batch.min_work()
    outlines: list[_Outline] = []
    for num_slots in sorted(number * batch.multiple for number in numbers):
        limits = (percent * floor // (100 * num_slots) for percent in _SPLIT_PERCENTS)
        by_time = {outline.time: outline for outline in (_outline(batch, num_slots, limit=limit) for limit in limits)}
        outlines += [by_time[time] for time in sorted(by_time)[:_OUTLINES]]
    return sorted(outlines)


def _outline(batch: SizedBatch, num_slots: int, *, limit: int) -> _Outline:
    """A slot lasts as long as its costliest sample, the longest come first, or as what the others have to hold."""
    levels, slots, ranks = batch.levels_within(limit), np.arange(num_slots), batch.dp_cp_size
    costs = batch.at(batch.costs, levels)
    order = np.argsort(-costs, kind="stable")
    costs, widths = costs[order], 1 << levels[order]
    first: Ints = np.cumsum(widths).searchsorted(slots * ranks, side="right")
    tops, areas = np.append(costs, 0)[first], np.append(0, np.cumsum(costs * widths))
    # What each of the slots from this one on would have to hold.
    even = (areas[-1] - areas[first]) // (ranks * (num_slots - slots))
    load = int(even[even >= tops].min(initial=int(even[0])))
    pipeline = batch.waiting.pipeline
    idle = (pipeline.num_stages - 1) * (load + batch.per_microbatch) // pipeline.num_chunks
    time = int(np.maximum(tops, load).sum()) + num_slots * batch.per_microbatch + idle
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
    widths = 1 << levels[high]
    slot_of = (np.cumsum(widths) - 1) // batch.dp_cp_size  # nearly those of `_shelve`
    tops = costs[high][np.unique(slot_of, return_index=True)[1]]
    spare = (batch.dp_cp_size - sums(widths, slot_of, tops.size)).clip(0)
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
    slot_of = _first_fit(levels[order], dp_cp_size=batch.dp_cp_size)
    num_filled = int(slot_of.max()) + 1
    slots, ranks = np.zeros((2, levels.size), dtype=np.int64)
    for slot in range(num_filled):
        members = order[slot_of == slot]
        # The largest first, so that each starts at a multiple of its size.
        by_size = members[np.lexsort((members, -levels[members]))]
        slots[members], ranks[by_size] = slot, np.cumsum(1 << levels[by_size]) - (1 << levels[by_size])
    num_slots = np.full(batch.dp_cp_size, -(-num_filled // batch.multiple) * batch.multiple)
    return _sized_plan(ranks[pack_of], slots[pack_of], levels=levels[pack_of], num_slots=num_slots)


def _first_fit(levels: Ints, *, dp_cp_size: int) -> Ints:
    """The slot of each pack, in their order."""
    slot_of, spare, first_open = list[int](), list[int](), 0  # spare: free ranks of each slot
    for level in levels.tolist():
        while first_open < len(spare) and not spare[first_open]:
            first_open += 1
        slot = next((slot for slot in range(first_open, len(spare)) if spare[slot] >> level), len(spare))
        if slot == len(spare):
            spare.append(dp_cp_size)
        spare[slot] -= 1 << level
        slot_of.append(slot)
    return np.array(slot_of, dtype=np.int64)
