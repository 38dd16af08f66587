"""One global batch in integers, the exact time of a plan, and the ten steps that make a plan.

A bin is a micro-batch of a rank. Ranks that wait for one another in every micro-batch form a sync group; its slot is
one bin of each of its ranks, and lasts as long as the most loaded bin. A step lasts as long as the slowest group.

    1. Sort samples by cost, and start from the fewest slots that the cap allows (`plan_slots`).
    2. A sample that costs more than the mean of what remains dominates its slot: other samples fill the slot's bins up
       to its cost. Dominated slots go to groups by list scheduling, the longest first (`_dominated_slots`).
    3. The remaining cost is spread over the other slots like water: every bin has a target (`_targets`).
    4. Longest first: the least loaded group, there the bin furthest below its target that has room (`assign_lpt`).
    5. No bin stays empty where there are samples (`fill_empty_bins`); like loads share a slot (`_align_loads`).
    6. Groups above the mean get lower targets, at most three times (`equalize`).
    7. Small batches: moves and swaps that relieve the slowest group (`local_search.py`).
    8. Try the next number of slots, until two do not help or the plan is near the bound (`bound.py`).
    9. Where several groups share expert work, search how much of it dominated slots may hold (`_search_expert_cap`).
    10. Order the slots (`order_slots`).

The objective only sets the size of sync groups (`step`: one rank). Ranks with pipeline stages have a file of their own,
`pipeline_packing.py`. Numbers are integers and ties go to the lower index, so that every rank makes the same plan.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from heapq import heappop, heappush

import numpy as np

from megatron_balance.planner import bound
from megatron_balance.planner.list_scheduling import assign_lpt, fill_capped, fill_empty_bins
from megatron_balance.planner.local_search import LocalSearch
from megatron_balance.planner.objective import Waiting, organ_pipe_order
from megatron_balance.planner.problem import INT_MAX, Ints, sums

GOOD_ENOUGH = 1024
"""A plan within 1/1024 of the bound ends the search for the number of slots."""

CORRECTIONS = 3
"""Times that targets are corrected."""

_CAP_PARTS = 5
"""Caps of expert work in dominated slots are tried in so many parts of what a packing loses."""

_ROUNDS = 200
"""Rounds of the local search."""

_SEARCHED = 1024
"""Samples of a batch up to which pairs are compared; larger batches gain less than 0.01 %."""


@dataclass(frozen=True)
class Plan:
    """The micro-batches of a batch."""

    microbatch_of: Ints  # [num_samples] rank * num_microbatches + slot; the first rank where several share one
    cp_sizes: Ints  # [num_ranks, num_microbatches] ranks that share each, as DataSchedule.cp_size_grid; 1 at one size


@dataclass(frozen=True, eq=False)
class Batch:
    """A global batch at one context-parallel size.

    Costs have one phase, or, where ranks meet between the two, vision encoder and language model. An over-long sample
    weighs `cap + 1`: it runs alone.
    """

    costs: Ints  # [num_phases, num_samples] on a sample's rank
    _: KW_ONLY
    expert_cost: Ints  # [num_samples] cost that the expert-parallel group of its rank shares
    weights: Ints  # [num_samples] room in a micro-batch: padded tokens, or 1 where samples are counted
    cap: int  # room of a micro-batch
    num_ranks: int  # data-parallel ranks
    waiting: Waiting  # which of them wait for one another
    ep_dp_size: int = 1  # neighbouring ranks that share the work of experts
    per_microbatch: int = 0  # fixed cost of a micro-batch, an empty one included
    gather: int = 0  # least cost of its last phase, that included: the time of gathering weights
    multiple: int = 1  # the number of micro-batches is a multiple of this
    shift: int = 0  # costs are in units of 2**shift of the cost model's
    kinds: tuple[Batch, ...] = ()  # the samples as if all chunks of a pipeline were of each kind, where they differ

    @property
    def num_samples(self) -> int:
        """Samples of the global batch."""
        return self.weights.size

    @property
    def sync_size(self) -> int:
        """Ranks of a sync group."""
        return self.waiting.sync_size

    @property
    def num_groups(self) -> int:
        """Sync groups."""
        return self.num_ranks // self.sync_size

    @cached_property
    def local_cost(self) -> Ints:
        """`[num_samples]` cost on a sample's rank; at least 1, so that samples that cost nothing are spread as well."""
        return np.maximum(self.costs.sum(axis=0), 1)

    @cached_property
    def oversized(self) -> Ints:
        """Ids of the samples longer than the cap."""
        return np.flatnonzero(self.weights > self.cap)

    def take(self, ids: Ints) -> Batch:
        """The samples of these ids, in their order."""
        kinds = tuple(kind.take(ids) for kind in self.kinds)
        costs, expert_cost, weights = self.costs[:, ids], self.expert_cost[ids], self.weights[ids]
        return replace(self, costs=costs, expert_cost=expert_cost, weights=weights, kinds=kinds)

    def with_sample_cap(self, max_samples: int) -> Batch:
        """A batch whose bins hold at most `max_samples` samples as well.

        Where each weighs at least that part of the cap, no more fit. It is stricter than both caps where a bin mixes
        heavy samples with light ones; bounds are those of the batch without.
        """
        weights = np.maximum(self.weights * max_samples, self.cap)
        return replace(self, weights=weights, cap=self.cap * max_samples)

    def loads(self, bin_of: Ints, num_slots: int) -> Ints:
        """Cost of every bin with `per_microbatch` and an even share of its expert-parallel group's work, or `gather`.

        For `(group * num_slots + slot) * sync_size + column` of each sample `[num_phases, num_groups, num_slots,
        sync_size]`, rounded up.
        """
        num_bins, shape = self.num_ranks * num_slots, (self.num_groups, num_slots, self.sync_size)
        loads = np.stack([sums(phase, bin_of, num_bins).reshape(shape) for phase in self.costs])
        if self.ep_dp_size > 1:
            work = sums(self.expert_cost, bin_of, num_bins).reshape(shape).swapaxes(0, 1)
            work = work.reshape(num_slots, -1, self.ep_dp_size).sum(axis=2)
            share = (-(-work // self.ep_dp_size)).repeat(self.ep_dp_size, axis=1)
            loads[-1] += share.reshape(num_slots, self.num_groups, self.sync_size).swapaxes(0, 1)
        loads[-1] = np.maximum(loads[-1] + self.per_microbatch, self.gather)
        return loads

    def slot_times(self, bin_of: Ints, num_slots: int) -> Ints:
        """`[num_groups, num_slots]`: a slot lasts as long as its most loaded bin, in each phase."""
        return self.loads(bin_of, num_slots).max(axis=3).sum(axis=0)

    def cost_grid(self, microbatch_of: Ints, cp_sizes: Ints) -> Ints:
        """Cost of every micro-batch, `[num_ranks, num_microbatches]`. Of `cp_sizes` only the shape matters."""
        return self._rank_loads(microbatch_of, cp_sizes.shape[1]).sum(axis=0)

    def time(self, microbatch_of: Ints, cp_sizes: Ints) -> int:
        """Predicted time of the step, in the units of the costs; arguments as for `cost_grid`."""
        num_slots, times = cp_sizes.shape[1], list[Ints]()
        for kind in self.kinds or (self,):
            loads = kind._rank_loads(microbatch_of, num_slots).reshape(len(kind.costs), -1, self.sync_size, num_slots)
            times.append(loads.max(axis=2).sum(axis=0))
        return int(self.waiting.times(np.stack(times, axis=1)).max())

    def _rank_loads(self, microbatch_of: Ints, num_slots: int) -> Ints:
        """`[num_phases, num_ranks, num_slots]`."""
        single = replace(self, waiting=replace(self.waiting, sync_size=1))
        return single.loads(microbatch_of, num_slots)[..., 0]

    @cached_property
    def min_slots(self) -> int:
        """Micro-batches that every rank needs at least, a multiple of `multiple`."""
        return bound.min_slots(self)

    @cached_property
    def min_work(self) -> int:
        """Work of the slowest group at least, over all stages together and without `per_microbatch`."""
        return bound.min_work(self)

    def min_time(self, num_slots: int) -> int:
        """A time that no plan with this many micro-batches or more can beat."""
        work, longest = self.min_work + num_slots * self.per_microbatch, bound.largest_sample(self)
        least = self.waiting.at_least(work, empty=self.per_microbatch, longest=longest + self.per_microbatch)
        gathered = self.waiting.at_least(num_slots * self.gather, empty=0)
        return max(least, gathered, bound.slowest_stage(self, num_slots))

    def lower_bound(self) -> int:
        """A time that no plan which may move samples can beat."""
        return self.min_time(self.min_slots)


@dataclass(frozen=True)
class _Packing:
    """Samples in bins, `(group * num_slots + slot) * sync_size + column`, and what follows from them."""

    bin_of: Ints
    num_slots: int
    time: int  # of the step


def plan_slots(batch: Batch, *, num_slots: int | None = None) -> Plan:
    """Plans a batch, in `num_slots` micro-batches of every rank, or in the number that is best."""
    order = np.lexsort((-batch.expert_cost, -batch.weights, -batch.costs.sum(axis=0)))
    batch = batch.take(order)
    best: _Packing | None = None
    tries_without_gain = max_tried = 0
    for number in slot_numbers(batch) if num_slots is None else (num_slots,):
        if number <= max_tried:
            continue
        if best is not None and (tries_without_gain == 1 or _is_near_bound(batch, best.time, number)):
            break
        packing = _pack(batch, number)
        max_tried = max(max_tried, packing.num_slots)
        packing = _searched(batch, packing)
        tries_without_gain += 1
        if best is None or packing.time < best.time:
            best, tries_without_gain = packing, 0
    assert best is not None, "one number of slots is always tried"
    best = _search_expert_cap(batch, best)
    microbatch_of = np.empty_like(order)
    microbatch_of[order] = order_slots(batch, best.bin_of, best.num_slots)
    return Plan(microbatch_of, np.ones((batch.num_ranks, best.num_slots), dtype=np.int64))


def slot_numbers(batch: Batch) -> range:
    """Numbers of slots to try, ascending: more slots than samples would only add dummies."""
    step = batch.multiple
    largest = batch.num_samples // (batch.num_ranks * step) * step
    return range(batch.min_slots, max(largest, batch.min_slots) + 1, step)


def _is_near_bound(batch: Batch, time: int, num_slots: int) -> bool:
    least = batch.min_time(num_slots)
    return time <= least + least // GOOD_ENOUGH


def _pack(batch: Batch, num_slots: int) -> _Packing:
    """A packing in this many slots, or in the smallest number above that the samples fit in."""
    work = batch.min_work
    while True:
        # Fuller dominated slots may leave room where others leave none. Nearly full bins of a rank waste less room one
        # after another than side by side.
        for slope, expert_cap in ((0, work), (0, work + work // 8) if batch.sync_size > 1 else (2 * num_slots, work)):
            packing = equalize(batch, num_slots, slope=slope, expert_cap=expert_cap)
            if packing is not None:
                return packing
        num_slots += batch.multiple * max(1, num_slots // (32 * batch.multiple))


def _searched(batch: Batch, packing: _Packing) -> _Packing:
    """The packing after the local search, if that is faster; a larger batch is searched only where the cap is tight."""
    number = packing.num_slots
    is_tight = batch.sync_size == 1 and batch.num_samples <= 4 * _SEARCHED
    if batch.num_samples > _SEARCHED and (not is_tight or _is_near_bound(batch, packing.time, number)):
        return packing
    search = LocalSearch(batch, packing.bin_of, number)
    search.improve(_ROUNDS)
    bin_of = _align_loads(batch, search.bin_of, number) if len(batch.costs) == 1 else search.bin_of
    time = int(batch.slot_times(bin_of, number).sum(axis=1).max())
    return replace(packing, bin_of=bin_of, time=time) if time < packing.time else packing


def _search_expert_cap(batch: Batch, best: _Packing) -> _Packing:
    """The best packing with other caps of expert work, between the least work and the time of the slowest group."""
    low, high = batch.min_work, best.time - best.num_slots * batch.per_microbatch
    if not 1 < batch.num_groups < batch.num_ranks or high - low <= low >> 8:
        return best
    caps = (low + (high - low) * part // _CAP_PARTS for part in range(1, _CAP_PARTS))
    packings = [equalize(batch, best.num_slots, slope=0, expert_cap=cap) for cap in caps]
    searched = (_searched(batch, packing) for packing in packings if packing is not None)
    return min([best, *searched], key=lambda packing: packing.time)


def equalize(batch: Batch, num_slots: int, *, slope: int, expert_cap: int) -> _Packing | None:
    """The best of a packing and its corrections; None where a sample finds no room.

    `expert_cap`: time up to which dominated slots are filled with expert work. `slope`: see `_targets`.
    """
    fixed, bases, used = _dominated_slots(batch, num_slots, expert_cap=expert_cap)
    free = np.flatnonzero(fixed < 0)
    correction, best = np.zeros(batch.num_groups, dtype=np.int64), None
    for _ in range(1 + CORRECTIONS if batch.sync_size > 1 else 1):
        bins, slack = _targets(batch, free, num_slots, slope=slope, bases=bases + correction, used=used)
        index = assign_samples(batch, free, slack)
        if (index < 0).any():
            break
        bin_of = fixed.copy()
        bin_of[free] = bins[index]
        bin_of = _align_loads(batch, fill_empty_bins(bin_of, batch.num_ranks * num_slots), num_slots)
        times = batch.slot_times(bin_of, num_slots).sum(axis=1)
        mean, longest = int(times.sum()) // times.size, int(times.max())
        if best is None or longest < best.time:
            best = _Packing(bin_of, num_slots, longest)
        if longest == mean or mean >= best.time:
            break
        correction += times - mean
    return best


def _dominated_slots(batch: Batch, num_slots: int, *, expert_cap: int) -> tuple[Ints, Ints, Ints]:
    """The bin of each sample, -1 for those in no dominated slot; of each group their time and their number."""
    costs, weights, width, groups = (
        batch.local_cost,
        batch.weights.clip(1, batch.cap),
        batch.sync_size,
        batch.num_groups,
    )
    bin_of, free = np.full(costs.size, -1, dtype=np.int64), np.arange(costs.size)
    times: list[int] = []
    while width > 1 and free.size and len(times) < num_slots * groups - 1:
        remaining = num_slots * groups - len(times)
        tops = costs[free[::width]][: remaining - 1]
        mean = int(costs[free].sum()) // (width * remaining)
        count = int(((tops > mean) & (tops >= tops[0] - tops[0] // 4)).sum())
        if not count:
            break
        tops = tops[:count]
        index = fill_capped(
            costs[free], weights[free], slack=tops.repeat(width), room=np.full(count * width, batch.cap)
        )
        if groups > 1 or batch.waiting.is_makespan:
            # The cheapest samples whose expert work exceeds the cap go back.
            chosen = np.flatnonzero(index >= 0)
            chosen = chosen[np.argsort(index[chosen] // width, kind="stable")]
            slot, work = index[chosen] // width, batch.expert_cost[free[chosen]]
            totals, first = np.cumsum(work), slot.searchsorted(np.arange(count))
            excess = -(-(totals - (totals[first] - work[first])[slot]) // width) > (expert_cap - tops)[slot]
            excess[first] = False
            index[chosen[excess]] = -1
        ids = free[index >= 0]
        bin_of[ids] = len(times) * width + index[index >= 0]
        times += (tops + sums(batch.expert_cost[ids], bin_of[ids] // width - len(times), count) // width).tolist()
        free = free[index < 0]
    bases, used = np.zeros((2, groups), dtype=np.int64)
    new_slot = np.zeros(len(times) + 1, dtype=np.int64)
    open_groups = [(0, group) for group in range(groups)]
    for slot in np.argsort(-np.array(times, dtype=np.int64), kind="stable").tolist():
        base, group = heappop(open_groups)
        new_slot[slot] = group * num_slots + used[group]
        bases[group] = base + times[slot]
        used[group] += 1
        if used[group] < num_slots:
            heappush(open_groups, (int(bases[group]), group))
    return np.where(bin_of < 0, -1, new_slot[bin_of // width] * width + bin_of % width), bases, used


def _targets(batch: Batch, free: Ints, num_slots: int, *, slope: int, bases: Ints, used: Ints) -> tuple[Ints, Ints]:
    """The bins of slots that no sample dominates, and the cost that each is to reach, `[groups, bins]` to choose from.

    Of single ranks the costliest is `1 + slope` times the cheapest. `free`: the samples that these bins hold.
    """
    local, expert = int(batch.local_cost[free].sum()), int(batch.expert_cost[free].sum())
    if batch.sync_size == 1:
        profile = 2 * num_slots + slope * (2 * num_slots - 1 - 2 * np.arange(num_slots))
        slack = np.tile(-(-local // (batch.num_ranks * int(profile.sum()))) * profile, (batch.num_ranks, 1))
        return np.arange(slack.size), slack
    ascending = np.sort(bases[used < num_slots])
    volume = -(-(local + expert) // batch.sync_size)
    level = int((-(-(np.cumsum(ascending) + volume) // np.arange(1, ascending.size + 1))).min(initial=INT_MAX))
    # Of a slot's time, what is no expert work is the cost of its bins.
    gaps: list[int] = (level - bases).clip(0).tolist()
    targets = np.array([gap * local // max(local + expert, 1) for gap in gaps]) // np.maximum(num_slots - used, 1)
    slot, group = np.nonzero(np.arange(num_slots)[:, None] >= used)
    bins = ((group * num_slots + slot)[:, None] * batch.sync_size + np.arange(batch.sync_size)).reshape(-1)
    return bins, targets[group].repeat(batch.sync_size)[:, None]


def assign_samples(batch: Batch, ids: Ints, slack: Ints) -> Ints:
    """`assign_lpt` for samples of a batch, up to one without room: over-long ones first, which close their bins."""
    room = np.full(slack.shape, batch.cap, dtype=np.int64)
    loads = -slack.max(axis=1) if slack.shape[1] == 1 else np.zeros(len(slack), dtype=np.int64)
    bin_of = np.empty(ids.size, dtype=np.int64)
    over = batch.weights[ids] > batch.cap
    for part in (np.flatnonzero(over), np.flatnonzero(~over)) if over.any() else (np.arange(ids.size),):
        costs = batch.local_cost[ids[part]]
        # Where bins are chosen first, a bin is as loaded as it is near its target.
        added = costs + batch.expert_cost[ids[part]] if batch.sync_size == 1 or slack.shape[1] > 1 else costs
        weights = batch.weights[ids[part]].clip(max=batch.cap)
        bin_of[part] = assign_lpt(costs, weights, slack=slack, room=room, loads=loads, added=added, stops=True)
        if over.any():
            room.reshape(-1)[bin_of[over & (bin_of >= 0)]] = -1
    return bin_of


def _align_loads(batch: Batch, bin_of: Ints, num_slots: int) -> Ints:
    """Bins of each sync group sorted by load and cut into slots again, so that similar loads share a slot.

    Where several expert-parallel groups meet, each may get some of all loads, if that makes the slot shorter.
    """
    if batch.sync_size == 1:
        return bin_of
    loads = sums(batch.costs.sum(axis=0), bin_of, batch.num_ranks * num_slots).reshape(batch.num_groups, -1)
    position = np.argsort(np.argsort(-loads, axis=1, kind="stable"), axis=1, kind="stable")
    first = bin_of // loads.shape[1] * loads.shape[1]
    by_load = position.reshape(-1)[bin_of] + first
    if not 1 < batch.ep_dp_size < batch.sync_size:
        return by_load
    num_ep_groups = batch.sync_size // batch.ep_dp_size
    slot, column = np.divmod(by_load - first, batch.sync_size)
    down, across = np.divmod(column, num_ep_groups)
    across = np.where(down % 2 == 0, across, num_ep_groups - 1 - across)
    zigzag = slot * batch.sync_size + across * batch.ep_dp_size + down + first
    shorter = batch.slot_times(zigzag, num_slots) < batch.slot_times(by_load, num_slots)
    return np.where(shorter.reshape(-1)[by_load // batch.sync_size], zigzag, by_load)


def order_slots(batch: Batch, bin_of: Ints, num_slots: int) -> Ints:
    """Slots by descending time, in a pipeline in organ-pipe order; the bins of a slot from either end in turns."""
    times = batch.slot_times(bin_of, num_slots)
    order = organ_pipe_order(times) if batch.waiting.is_makespan else np.argsort(-times, axis=1, kind="stable")
    old_slot, column = np.divmod(bin_of, batch.sync_size)
    slot = np.argsort(order, axis=1).reshape(-1)[old_slot]
    rank = old_slot // num_slots * batch.sync_size + np.where(slot % 2 == 0, column, batch.sync_size - 1 - column)
    return rank * num_slots + slot


def order_apart(batch: Batch, microbatch_of: Ints, num_slots: int) -> Ints:
    """`order_slots` of each rank by itself, so that ranks have like slots at the same time."""
    return order_slots(
        replace(batch, ep_dp_size=1, waiting=replace(batch.waiting, sync_size=1)), microbatch_of, num_slots
    )
