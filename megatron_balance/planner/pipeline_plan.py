"""Plans one global batch for ranks with pipeline stages, where a step takes as long as the slowest makespan.

    1. Numbers of micro-batches: from the least that the cap allows, rising by an eighth, to one sample each.
    2. For each number and two slopes: the slots of a group get targets that rise towards the middle of the step.
       Costliest sample first, to the least loaded group, there to the bin furthest below its target that has room.
    3. The best plans are improved in turns, and fewer of them from turn to turn: half of them go on.
    4. An improvement takes the slowest group. It draws pairs of one of its samples and a sample or a free place of any
       bin, and pairs of its slots; judges every exchange by the exact makespans of the groups concerned; and makes the
       best one if no group ends later than the slowest does now.

A group is the ranks that wait for one another in every micro-batch (experts spread over ranks); a bin is a micro-batch
of one of its ranks. Pairs are drawn by a counter (splitmix64), so that every rank draws the same.
"""

from __future__ import annotations

import numpy as np

from megatron_balance.planner.batch import Batch, Plan, sums
from megatron_balance.planner.inputs import Ints
from megatron_balance.planner.pipeline import makespans
from megatron_balance.planner.plan import in_slots, leveled, no_empty, pour_samples, with_headroom

EFFORT = 1200
"""Improvements tried over all plans."""

PAIRS = 96
"""Exchanges that one improvement draws."""

SLOPES = (2, 8)
"""Slopes of targets: the middle slot costs three or nine times the first and the last."""

SURVIVORS = (8, 4, 2, 1)
"""Plans that are improved in each turn."""

USUAL_PASSES = 64
"""Passes of a stage from which on fewer improvements are tried: effort is time."""

SLOT_TURN = 4
"""Every so many improvements exchanges of slots are tried first."""


def plan_pipeline(batch: Batch, *, rows: int | None = None, effort: int = EFFORT) -> Plan:
    """Plans a batch whose ranks have pipeline stages, in `rows` micro-batches or in the number that is best.

    `effort`, the improvements tried, is the same on all ranks.
    """
    order = np.lexsort((-batch.weights, -batch.own))
    batch = with_headroom(batch.take(order))
    starts: list[list[tuple[Ints, int]]] = [[], []]
    numbers = numbers_of_microbatches(batch, rows)
    while not any(starts):
        for number in numbers:
            bins = [_list_schedule(batch, profile) for profile in profiles(batch, number)]
            starts[0] += [(bin_of, number) for bin_of in bins if bin_of is not None]
            if batch.span > 1:
                starts[1] += [(bin_of, number) for bin_of in _level_rows(batch, number)]
        numbers = [numbers[-1] + batch.multiple * max(1, numbers[-1] // (32 * batch.multiple))]
    microbatch_of = np.empty_like(order)
    microbatch_of[order], number = improved(batch, starts, effort=effort)
    return Plan(microbatch_of, np.ones((batch.num_ranks, number), dtype=np.int64))


def improved(
    batch: Batch, starts: list[list[tuple[Ints, int]]], *, bound: bool = False, effort: int = EFFORT
) -> tuple[Ints, int]:
    """The best plan that exchanges lead to: `rank * num_microbatches + slot` of each sample, and their number.

    Args:
        batch: the samples, with headroom.
        starts: of each way to make them, pairs of `[num_samples]` `(group * num_microbatches + slot) * span + column`
            and num_microbatches. As many of each way take part in the first turn.
        bound: samples stay on their ranks.
        effort: improvements tried.
    """
    ways = [[_Assignment(batch, bin_of, number, bound=bound) for bin_of, number in way] for way in starts if way]
    plans = [plan for way in ways for plan in _fastest(way, SURVIVORS[0] // len(ways))]
    for survivors in SURVIVORS:
        plans = _fastest(plans, survivors)
        for plan in plans:
            plan.improve(effort // (len(SURVIVORS) * len(plans)))
    best = min(plans, key=lambda plan: plan.time)
    return best.microbatch_of(), best.num_microbatches


def numbers_of_microbatches(batch: Batch, rows: int | None = None) -> list[int]:
    """Numbers to try, rising, from the least that the cap allows to one sample each, at most eight times the least."""
    if rows is not None:
        return [rows]
    multiple, least = batch.multiple, batch.least_rows
    most = min(-(-batch.num_samples // (batch.num_ranks * multiple)) * multiple, 8 * least)
    numbers = [least]
    while numbers[-1] < most:
        numbers.append(min(max(-(-numbers[-1] * 9 // (8 * multiple)) * multiple, numbers[-1] + multiple), most))
    return numbers


def profiles(batch: Batch, num_microbatches: int) -> list[Ints]:
    """`[num_microbatches]` relative targets of slots, each a way to start.

    They rise towards the middle, to three or nine times the first. Under several chunks a stage runs a group of
    micro-batches through a chunk before the next one: the second way has groups of like ones, each falling slightly.
    """
    pipeline = batch.waiting.pipeline
    groups, left = divmod(num_microbatches, pipeline.group_size)
    if pipeline.num_chunks == 1 or left:
        return [_mountain(num_microbatches, slope) for slope in SLOPES]
    falling = np.tile(np.arange(pipeline.group_size)[::-1], groups)
    of_groups = _mountain(groups, SLOPES[0]).repeat(pipeline.group_size)
    return [_mountain(num_microbatches, SLOPES[0]), 10 * of_groups + falling]


def _mountain(number: int, slope: int) -> Ints:
    index = np.arange(number)
    height = np.minimum(index, index[::-1])
    return max(int(height.max()), 1) + slope * height


def _list_schedule(batch: Batch, profile: Ints) -> Ints | None:
    """The bin `(group * num_microbatches + slot) * span + column` of each sample; None where one finds no room."""
    targets = profile * (int(batch.own.sum()) // (batch.num_ranks * int(profile.sum())) + 1)
    targets = np.tile(targets.repeat(batch.span), (batch.num_groups, 1))
    bin_of = pour_samples(batch, np.arange(batch.num_samples), targets)
    return None if (bin_of < 0).any() else no_empty(bin_of, targets.size)


def _level_rows(batch: Batch, num_microbatches: int) -> list[Ints]:
    """As `_list_schedule`: rows of like samples as without stages, the highest in the middle.

    What stands beside a dominant sample is free but for its shared work, which may take a quarter of the sample's cost
    in one way, and as much as a rank's even share in the other.
    """
    highest = int(batch.own.max(initial=0))
    ways: list[Ints] = []
    for limit in (highest + highest // 4, batch.least_work):
        packing = leveled(batch, num_microbatches, slope=0, limit=limit)
        if packing is not None:
            rank, slot = np.divmod(in_slots(batch, packing.bin_of, num_microbatches), num_microbatches)
            group, column = np.divmod(rank, batch.span)
            ways.append((group * num_microbatches + slot) * batch.span + column)
    return ways


def _fastest(plans: list[_Assignment], number: int) -> list[_Assignment]:
    return sorted(plans, key=lambda plan: plan.time)[:number]


class _Assignment:
    """Samples in bins, and the exact time of every group."""

    def __init__(self, batch: Batch, bin_of: Ints, num_microbatches: int, *, bound: bool) -> None:
        self.batch, self.bin_of, self.num_microbatches = batch, bin_of, num_microbatches
        self._counter = 0
        self._ranks = self._samples_by_rank() if bound else None
        kinds, cells = len(batch.costs), (batch.num_groups, num_microbatches, batch.span)
        num_bins = batch.num_ranks * num_microbatches
        self._own = np.stack([sums(row, bin_of, num_bins).reshape(cells) for row in batch.costs])
        self._shared = sums(batch.shared, bin_of, num_bins).reshape(*cells[:2], -1, batch.expert_span).sum(axis=3)
        self._weights = sums(batch.weights, bin_of, num_bins)
        self._counts = np.bincount(bin_of, minlength=num_bins)
        self._times = self._slot_times(self._own, np.broadcast_to(self._shared, (kinds, *self._shared.shape)))
        self._ends = self._makespans(self._times.transpose(1, 0, 2))

    @property
    def time(self) -> int:
        """Of the slowest group."""
        return int(self._ends.max())

    def microbatch_of(self) -> Ints:
        """`rank * num_microbatches + slot` of each sample."""
        slot, column = np.divmod(self.bin_of, self.batch.span)
        group, slot = np.divmod(slot, self.num_microbatches)
        return (group * self.batch.span + column) * self.num_microbatches + slot

    def improve(self, rounds: int) -> None:
        """Relieves the slowest group, so many times; fewer where a simulation takes longer than usual."""
        num_passes = 2 * self.num_microbatches * self.batch.waiting.pipeline.num_chunks
        for turn in range(min(rounds, rounds * USUAL_PASSES // num_passes + 1)):
            group = int(self._ends.argmax())
            if turn % SLOT_TURN == 0 and self.num_microbatches > 1:
                self._exchange_slots(group)
            self._exchange_samples(group)

    def _makespans(self, times: Ints) -> Ints:
        """`[num_candidates, num_kinds, num_microbatches]` → `[num_candidates]`."""
        return makespans(times, self.batch.waiting.pipeline)

    def _slot_times(self, own: Ints, shared: Ints) -> Ints:
        """Time of slots whose bins cost so: `[..., span]` and `[..., span // expert_span]` → `[...]`."""
        expert_span = self.batch.expert_span
        if expert_span > 1:
            own = own + (-(-shared // expert_span)).repeat(expert_span, axis=-1)
        return own.max(axis=-1) + self.batch.launch

    def _draw(self, number: int) -> Ints:
        """Numbers below 2**31: splitmix64 of a counter (G. L. Steele et al., "Fast splittable pseudorandom number
        generators", 2014).
        """
        self._counter += number
        state = np.arange(self._counter - number, self._counter, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((state ^ (state >> np.uint64(31))) >> np.uint64(33)).astype(np.int64)

    def _exchange_slots(self, group: int) -> None:
        first, second = self._draw(2 * PAIRS).reshape(2, -1) % self.num_microbatches
        times = np.tile(self._times[:, group], (PAIRS, 1, 1))
        pairs = np.arange(PAIRS)
        times[pairs, :, first], times[pairs, :, second] = times[pairs, :, second], times[pairs, :, first]
        ends = self._makespans(times)
        best = int(ends.argmin())
        if ends[best] >= self._ends[group]:
            return
        slots = np.arange(self.num_microbatches)
        slots[[first[best], second[best]]] = second[best], first[best]
        self._own[:, group], self._shared[group] = self._own[:, group, slots], self._shared[group, slots]
        self._times[:, group], self._ends[group] = self._times[:, group, slots], ends[best]
        width = self.num_microbatches * self.batch.span
        block = slice(group * width, (group + 1) * width)
        for values in (self._weights, self._counts):
            values[block] = values[block].reshape(-1, self.batch.span)[slots].reshape(-1)
        moved = np.flatnonzero(self.bin_of // width == group)
        slot, column = np.divmod(self.bin_of[moved] - group * width, self.batch.span)
        self.bin_of[moved] = group * width + slots[slot] * self.batch.span + column

    def _samples_by_rank(self) -> tuple[Ints, Ints, Ints]:
        """Sample ids rank by rank, and of each rank the first of them and their number."""
        width = self.num_microbatches * self.batch.span
        ranks = self.bin_of // width * self.batch.span + self.bin_of % self.batch.span
        counts = np.bincount(ranks, minlength=self.batch.num_ranks)
        return np.argsort(ranks, kind="stable"), np.cumsum(counts) - counts, counts

    def _partners(self, group: int, item: Ints, draw: Ints, *, members: Ints) -> Ints:
        """What each item is exchanged with: a sample, or from num_samples on a free place of a bin.

        Every second one is of the group of the item, where samples are bound to ranks all are of its rank.
        """
        num_samples, span = self.batch.num_samples, self.batch.span
        first = group * self.num_microbatches * span
        if self._ranks is not None:
            ids, starts, counts = self._ranks
            column = self.bin_of[item] % span
            rank = group * span + column
            index = draw % (counts[rank] + self.num_microbatches)
            sample = ids[starts[rank] + np.minimum(index, counts[rank] - 1)]
            return np.where(index < counts[rank], sample, num_samples + first + (index - counts[rank]) * span + column)
        index = draw % (members.size + self.num_microbatches * span)
        sample = members[np.minimum(index, members.size - 1)]
        local = np.where(index < members.size, sample, num_samples + first + index - members.size)
        return np.where(np.arange(PAIRS) % 2 == 0, local, draw % (num_samples + self._counts.size))

    def _exchange_samples(self, group: int) -> None:
        batch = self.batch
        members = np.flatnonzero(self.bin_of // (self.num_microbatches * batch.span) == group)
        if not members.size:
            return
        item, draw = self._draw(2 * PAIRS).reshape(2, -1)
        item = members[item % members.size]
        partner = self._partners(group, item, draw, members=members)
        is_sample = partner < batch.num_samples
        other = np.minimum(partner, batch.num_samples - 1)
        origin = self.bin_of[item]
        target = np.where(is_sample, self.bin_of[other], partner - batch.num_samples)
        weight = batch.weights[item] - np.where(is_sample, batch.weights[other], 0)
        allowed = (origin != target) & (is_sample | (self._counts[origin] > 1))
        allowed &= (self._weights[target] + weight <= batch.cap) & (self._weights[origin] - weight <= batch.cap)
        kept = np.flatnonzero(allowed)
        if not kept.size:
            return
        item, other, origin, target, weight = (values[kept] for values in (item, other, origin, target, weight))
        is_sample = is_sample[kept]
        own = batch.costs[:, item] - np.where(is_sample, batch.costs[:, other], 0)
        shared = batch.shared[item] - np.where(is_sample, batch.shared[other], 0)
        times_from, times_to, to_group, same_group = self._times_after(group, origin, target, own, shared)
        ends = self._makespans(np.concatenate([times_from, times_to[~same_group]]))
        after = ends[: kept.size].copy()
        after[~same_group] = np.maximum(after[~same_group], ends[kept.size :])
        best = int(after.argmin())
        if after[best] > self._ends[group]:
            return
        (from_bin, to_bin), into = (int(origin[best]), int(target[best])), int(to_group[best])
        self.bin_of[item[best]] = to_bin
        if is_sample[best]:
            self.bin_of[other[best]] = from_bin
        else:
            self._counts[from_bin] -= 1
            self._counts[to_bin] += 1
        flat_own, flat_shared = self._own.reshape(len(own), -1), self._shared.reshape(-1)
        for position, sign in ((from_bin, -1), (to_bin, 1)):
            flat_own[:, position] += sign * own[:, best]
            flat_shared[position // batch.expert_span] += sign * shared[best]
            self._weights[position] += sign * weight[best]
        self._times[:, group], self._ends[group] = times_from[best], ends[best]
        if into != group:
            foreign = int(np.count_nonzero(~same_group[:best]))
            self._times[:, into], self._ends[into] = times_to[best], ends[kept.size + foreign]

    def _times_after(
        self, group: int, origin: Ints, target: Ints, own: Ints, shared: Ints
    ) -> tuple[Ints, Ints, Ints, Ints]:
        """Slot times `[num_pairs, num_kinds, num_microbatches]` of both groups after each exchange."""
        batch, span = self.batch, self.batch.span
        pairs, num_blocks = np.arange(origin.size), span // batch.expert_span
        from_slot, from_column = np.divmod(origin, span)
        to_slot, to_column = np.divmod(target, span)
        to_group = to_slot // self.num_microbatches
        own_slots = self._own.reshape(len(own), -1, span)
        shared_slots = self._shared.reshape(-1, num_blocks)
        same_slot = from_slot == to_slot
        own_from, own_to = own_slots[:, from_slot], own_slots[:, to_slot]
        own_from[:, pairs, from_column] -= own
        own_to[:, pairs, to_column] += own
        shared_from, shared_to = shared_slots[from_slot], shared_slots[to_slot]
        shared_from[pairs, from_column // batch.expert_span] -= shared
        shared_to[pairs, to_column // batch.expert_span] += shared
        both = np.flatnonzero(same_slot)
        own_from[:, both, to_column[both]] += own[:, both]
        shared_from[both, to_column[both] // batch.expert_span] += shared[both]
        own_to[:, both], shared_to[both] = own_from[:, both], shared_from[both]
        after_from = self._slot_times(own_from, shared_from[None]).T
        after_to = self._slot_times(own_to, shared_to[None]).T
        times_from = np.tile(self._times[:, group], (origin.size, 1, 1))
        times_to = self._times[:, to_group].transpose(1, 0, 2).copy()
        times_from[pairs, :, from_slot % self.num_microbatches] = after_from
        times_to[pairs, :, to_slot % self.num_microbatches] = after_to
        same_group = to_group == group
        times_from[pairs[same_group], :, (to_slot % self.num_microbatches)[same_group]] = after_to[same_group]
        return times_from, times_to, to_group, same_group
