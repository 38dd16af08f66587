"""Plans one global batch for ranks with pipeline stages, where a step takes as long as the slowest makespan.

    1. Numbers of micro-batches: from the least that the cap allows, growing by an eighth, to one sample each.
    2. For each number and two slopes: the slots of a sync group get targets that rise towards the middle of the step.
       Costliest sample first, to the least loaded group, there to the bin furthest below its target that has room.
    3. The best plans are improved in turns, and fewer of them from turn to turn: half of them go on.
    4. An improvement takes the slowest group. It draws pairs of one of its samples and a sample or a free place of any
       bin, and pairs of its slots; judges every exchange by the exact makespans of the groups concerned; and makes the
       best exchange if no group ends later than the slowest does now.

Pairs are drawn by a counter (splitmix64), so that every rank draws the same.
"""

from __future__ import annotations

import numpy as np

from megatron_balance.planner.level_packing import Batch, Plan, assign_samples, equalize, order_slots
from megatron_balance.planner.list_scheduling import fill_empty_bins
from megatron_balance.planner.objective import makespans
from megatron_balance.planner.problem import Ints, sums

EFFORT = 1200
"""Improvements tried over all plans."""

_PAIRS = 96
"""Exchanges that one improvement draws."""

_DRAWS = 2
"""Times that a pair of the slowest group is drawn, on average, before the search ends without a gain."""

_SLOPES = (2, 8)
"""Slopes of targets: the middle slot costs three or nine times the first and the last."""

_MAX_STARTED = 2**17
"""Samples in starts of each way; where they are more, fewer numbers of micro-batches are tried, at least three."""

_SURVIVORS = (8, 4, 2, 1)
"""Plans that are improved in each turn."""

_USUAL_PASSES = 64
"""Passes of a stage from which on fewer improvements are tried: effort is time."""

_SLOT_TURN = 4
"""Every so many improvements exchanges of slots are tried first."""


def plan_pipeline(batch: Batch, *, num_slots: int | None = None, effort: int = EFFORT) -> Plan:
    """Plans a batch whose ranks have pipeline stages, in `num_slots` micro-batches or in the number that is best.

    `effort`, the improvements tried, is the same on all ranks.
    """
    order = np.lexsort((-batch.weights, -batch.local_cost))
    batch = batch.take(order)
    starts: list[list[tuple[Ints, int]]] = [[], []]
    numbers = slot_numbers(batch, num_slots)
    numbers = numbers[:: -(-len(numbers) // max(_MAX_STARTED // max(batch.num_samples, 1), 3))]
    while not any(starts):
        for number in numbers:
            ways = [_list_schedule(batch, profile) for profile in profiles(batch, number)]
            starts[0] += [(bin_of, number) for bin_of in ways if bin_of is not None]
            if batch.sync_size > 1:
                starts[1] += [(bin_of, number) for bin_of in _dominated_starts(batch, number)]
        numbers = [numbers[-1] + batch.multiple * max(1, numbers[-1] // (32 * batch.multiple))]
    microbatch_of = np.empty_like(order)
    microbatch_of[order], number = search_makespan(batch, starts, effort=effort)
    return Plan(microbatch_of, np.ones((batch.num_ranks, number), dtype=np.int64))


def search_makespan(
    batch: Batch, starts: list[list[tuple[Ints, int]]], *, fixed_ranks: bool = False, effort: int = EFFORT
) -> tuple[Ints, int]:
    """The best plan that exchanges lead to: `rank * num_microbatches + slot` of each sample, and their number.

    Args:
        batch: the samples.
        starts: of each way to make them, pairs of `[num_samples]` `(group * num_slots + slot) * sync_size + column` and
            num_slots. As many of each way take part in the first turn.
        fixed_ranks: samples stay on their ranks.
        effort: improvements tried.
    """
    ways = [[_Search(batch, *start, fixed_ranks=fixed_ranks) for start in way] for way in starts if way]
    searches = [search for way in ways for search in _fastest(way, _SURVIVORS[0] // len(ways))]
    for survivors in _SURVIVORS:
        searches = _fastest(searches, survivors)
        for search in searches:
            search.improve(effort // (len(_SURVIVORS) * len(searches)))
    best = _fastest(searches, 1)[0]
    return best.microbatch_of(), best.num_slots


def slot_numbers(batch: Batch, num_slots: int | None = None) -> list[int]:
    """Numbers to try, ascending, from what the cap allows to one sample each, at most eight times the smallest."""
    if num_slots is not None:
        return [num_slots]
    multiple, smallest = batch.multiple, batch.min_slots
    largest = min(-(-batch.num_samples // (batch.num_ranks * multiple)) * multiple, 8 * smallest)
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


def _list_schedule(batch: Batch, profile: Ints) -> Ints | None:
    """The bin `(group * num_slots + slot) * sync_size + column` of each sample; None where one finds no room."""
    targets = profile * (int(batch.local_cost.sum()) // (batch.num_ranks * int(profile.sum())) + 1)
    targets = np.tile(targets.repeat(batch.sync_size), (batch.num_groups, 1))
    bin_of = assign_samples(batch, np.arange(batch.num_samples), targets)
    return None if (bin_of < 0).any() else fill_empty_bins(bin_of, targets.size)


def _dominated_starts(batch: Batch, num_slots: int) -> list[Ints]:
    """As `_list_schedule`: slots of like samples as without stages, the longest in the middle, for two expert caps."""
    highest = int(batch.local_cost.max(initial=0))
    ways: list[Ints] = []
    for expert_cap in (highest + highest // 4, batch.min_work):
        packing = equalize(batch, num_slots, slope=0, expert_cap=expert_cap)
        if packing is not None:
            rank, slot = np.divmod(order_slots(batch, packing.bin_of, num_slots), num_slots)
            group, column = np.divmod(rank, batch.sync_size)
            ways.append((group * num_slots + slot) * batch.sync_size + column)
    return ways


def _fastest(searches: list[_Search], number: int) -> list[_Search]:
    return sorted(searches, key=lambda search: search.time)[:number]


class _Search:
    """Samples in bins, the exact time of every sync group, and the exchanges that lower it."""

    def __init__(self, batch: Batch, bin_of: Ints, num_slots: int, *, fixed_ranks: bool) -> None:
        self.batch, self.bin_of, self.num_slots = batch, bin_of, num_slots
        self._counter = 0
        self._ranks = self._samples_by_rank() if fixed_ranks else None
        slots, num_bins = batch.num_groups * num_slots, batch.num_ranks * num_slots
        # Costs by kind of chunk.
        kinds, shape = batch.kinds or (batch,), (-1, slots, batch.sync_size)
        self._local_costs = np.stack([kind.costs[0] for kind in kinds])
        self._expert_costs = np.stack([kind.expert_cost for kind in kinds])
        self._fixed = np.array([kind.per_microbatch for kind in kinds], dtype=np.int64)
        self._loads = np.stack([sums(costs, bin_of, num_bins) for costs in self._local_costs]).reshape(shape)
        experts = np.stack([sums(costs, bin_of, num_bins) for costs in self._expert_costs]).reshape(shape)
        self._experts = experts.reshape(len(kinds), slots, -1, batch.ep_dp_size).sum(axis=3)
        self._weights = sums(batch.weights, bin_of, num_bins)
        self._counts = np.bincount(bin_of, minlength=num_bins)
        times = self._slot_times(self._loads, self._experts)
        self._times = times.reshape(-1, batch.num_groups, num_slots).swapaxes(0, 1)
        self._ends = makespans(self._times, batch.waiting.pipeline)

    @property
    def time(self) -> int:
        """Of the slowest group."""
        return int(self._ends.max())

    def microbatch_of(self) -> Ints:
        """`rank * num_slots + slot` of each sample."""
        slot, column = np.divmod(self.bin_of, self.batch.sync_size)
        group, slot = np.divmod(slot, self.num_slots)
        return (group * self.batch.sync_size + column) * self.num_slots + slot

    def improve(self, rounds: int) -> None:
        """Relieves the slowest group, so many times; fewer where a simulation takes long, or where no pair helps."""
        num_passes = 2 * self.num_slots * self.batch.waiting.pipeline.num_chunks
        num_samples = self.batch.num_samples
        num_pairs = num_samples // self.batch.num_groups * (num_samples + self._counts.size)
        patience, best, last_gain = _DRAWS * (num_pairs // _PAIRS + 1), self.time, 0
        for turn in range(min(rounds, rounds * _USUAL_PASSES // num_passes + 1)):
            group = int(self._ends.argmax())
            if self._ends[group] < best:
                best, last_gain = self._ends[group], turn
            elif turn - last_gain > patience:
                break
            if turn % _SLOT_TURN == 0 and self.num_slots > 1:
                self._exchange_slots(group)
            self._exchange_samples(group)

    def _slot_times(self, loads: Ints, experts: Ints) -> Ints:
        """Time of slots with such loads: `[..., sync_size]` and `[..., sync_size // ep_dp_size]` → `[...]`."""
        ep_dp_size = self.batch.ep_dp_size
        if ep_dp_size > 1:
            loads = loads + (-(-experts // ep_dp_size)).repeat(ep_dp_size, axis=-1)
        times = loads.max(axis=-1)
        return times + self._fixed.reshape(-1, *[1] * (times.ndim - 1))

    def _draw(self) -> Ints:
        """`[2, _PAIRS]` numbers below 2**31: splitmix64 of a counter (G. L. Steele et al., 2014)."""
        self._counter += 2 * _PAIRS
        state = np.arange(self._counter - 2 * _PAIRS, self._counter, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((state ^ (state >> np.uint64(31))) >> np.uint64(33)).astype(np.int64).reshape(2, -1)

    def _exchange_slots(self, group: int) -> None:
        first, second = self._draw() % self.num_slots
        pairs, times = np.arange(_PAIRS), np.tile(self._times[group], (_PAIRS, 1, 1))
        times[pairs, :, first], times[pairs, :, second] = times[pairs, :, second], times[pairs, :, first]
        ends = makespans(times, self.batch.waiting.pipeline)
        best = int(ends.argmin())
        if ends[best] >= self._ends[group]:
            return
        self._times[group], self._ends[group] = times[best], ends[best]
        width, base = self.batch.sync_size, group * self.num_slots
        old, new = (
            [base + int(first[best]), base + int(second[best])],
            [base + int(second[best]), base + int(first[best])],
        )
        self._loads[:, old], self._experts[:, old] = self._loads[:, new], self._experts[:, new]
        for values in (self._weights.reshape(-1, width), self._counts.reshape(-1, width)):
            values[old] = values[new]
        slot = self.bin_of // width
        for source, target in zip(old, new, strict=True):
            self.bin_of[slot == source] += (target - source) * width

    def _samples_by_rank(self) -> tuple[Ints, Ints, Ints]:
        """Sample ids rank by rank, and of each rank the first of them and their number."""
        width = self.batch.sync_size
        ranks = self.bin_of // (self.num_slots * width) * width + self.bin_of % width
        counts = np.bincount(ranks, minlength=self.batch.num_ranks)
        return np.argsort(ranks, kind="stable"), np.cumsum(counts) - counts, counts

    def _partners(self, group: int, item: Ints, draw: Ints, *, members: Ints) -> Ints:
        """Samples, or from num_samples on free places of bins: every second in the group, or all on the rank."""
        num_samples, width = self.batch.num_samples, self.batch.sync_size
        first_bin = group * self.num_slots * width
        if self._ranks is not None:
            ids, starts, counts = self._ranks
            column = self.bin_of[item] % width
            rank = group * width + column
            index = draw % (counts[rank] + self.num_slots)
            sample = ids[starts[rank] + np.minimum(index, counts[rank] - 1)]
            ghost = num_samples + first_bin + (index - counts[rank]) * width + column
            return np.where(index < counts[rank], sample, ghost)
        index = draw % (members.size + self.num_slots * width)
        sample = members[np.minimum(index, members.size - 1)]
        in_group = np.where(index < members.size, sample, num_samples + first_bin + index - members.size)
        return np.where(np.arange(_PAIRS) % 2 == 0, in_group, draw % (num_samples + self._counts.size))

    def _exchange_samples(self, group: int) -> None:
        batch = self.batch
        members = np.flatnonzero(self.bin_of // (self.num_slots * batch.sync_size) == group)
        if not members.size:
            return
        item, draw = self._draw()
        item = members[item % members.size]
        partner = self._partners(group, item, draw, members=members)
        is_sample = partner < batch.num_samples
        sample = np.minimum(partner, batch.num_samples - 1)
        origin = self.bin_of[item]
        target = np.where(is_sample, self.bin_of[sample], partner - batch.num_samples)
        weight = batch.weights[item] - np.where(is_sample, batch.weights[sample], 0)
        allowed = (origin != target) & (is_sample | (self._counts[origin] > 1))
        allowed &= (self._weights[target] + weight <= batch.cap) & (self._weights[origin] - weight <= batch.cap)
        if not allowed.any():
            return
        item, sample, origin, target, weight = (values[allowed] for values in (item, sample, origin, target, weight))
        is_sample = is_sample[allowed]
        local, expert = (
            costs[:, item] - np.where(is_sample, costs[:, sample], 0)
            for costs in (self._local_costs, self._expert_costs)
        )
        to_group = target // (self.num_slots * batch.sync_size)
        times = self._times_after(group, origin, target, local, expert)
        foreign = np.flatnonzero(to_group != group)
        ends = makespans(np.concatenate([times[0], times[1][foreign]]), batch.waiting.pipeline)
        after, to_ends = ends[: item.size].copy(), ends[: item.size].copy()
        to_ends[foreign] = ends[item.size :]
        after[foreign] = np.maximum(after[foreign], to_ends[foreign])
        best = int(after.argmin())
        if after[best] > self._ends[group]:
            return
        self.bin_of[item[best]] = target[best]
        if is_sample[best]:
            self.bin_of[sample[best]] = origin[best]
        loads, experts = (values.reshape(len(local), -1) for values in (self._loads, self._experts))
        for index, sign in ((origin[best], -1), (target[best], 1)):
            loads[:, index] += sign * local[:, best]
            experts[:, index // batch.ep_dp_size] += sign * expert[:, best]
            self._weights[index] += sign * weight[best]
            self._counts[index] += sign * (not is_sample[best])
        into = to_group[best]
        self._times[into], self._ends[into] = times[1][best], to_ends[best]
        self._times[group], self._ends[group] = times[0][best], ends[best]

    def _times_after(self, group: int, origin: Ints, target: Ints, local: Ints, expert: Ints) -> tuple[Ints, Ints]:
        """Slot times `[num_pairs, num_kinds, num_slots]` of the group and of partners' groups after an exchange."""
        width, ep_dp_size, pairs = self.batch.sync_size, self.batch.ep_dp_size, np.arange(origin.size)
        from_slot, to_slot = origin // width, target // width
        # Both ends of an exchange inside a slot change the first of its two copies.
        copy = np.where(from_slot == to_slot, 0, 1)
        both = np.stack([from_slot, to_slot], axis=1)
        loads, experts = self._loads[:, both], self._experts[:, both]
        for slots, column, sign in ((0, origin % width, -1), (copy, target % width, 1)):
            loads[:, pairs, slots, column] += sign * local
            experts[:, pairs, slots, column // ep_dp_size] += sign * expert
        after = self._slot_times(loads, experts).transpose(1, 0, 2)
        (to_group, to_index), from_index = np.divmod(to_slot, self.num_slots), from_slot % self.num_slots
        times, to_times = np.tile(self._times[group], (pairs.size, 1, 1)), self._times[to_group].copy()
        times[pairs, :, from_index] = after[:, :, 0]
        to_times[pairs, :, to_index] = after[pairs, :, copy]
        same = to_group == group
        times[pairs[same], :, to_index[same]] = after[pairs, :, copy][same]
        return times, to_times
