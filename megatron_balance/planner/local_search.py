"""Local search on a packing: exchanges that relieve the slowest sync group, judged by the exact time of groups.

A round takes the slowest group and draws pairs: one of its samples, and a sample or a ghost of any bin, every second
one of the same group. Every bin offers a ghost, which costs and weighs nothing: an exchange with it is a move. The best
exchange is made if all groups end before the slowest does now; with pipeline stages also if they end as late, which
leads out of dead ends. No bin gets heavier than the cap, and none is emptied. Pairs are drawn by a counter, so that
every rank draws the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from megatron_balance.planner.objective import makespans
from megatron_balance.planner.problem import Ints, sums

if TYPE_CHECKING:
    from megatron_balance.planner.level_packing import Batch

_PAIRS = 96
"""Exchanges that a round judges at most, of twice as many that it draws."""

_NEAR = 2**14
"""A plan that is within so small a part of what no plan beats is not improved."""

_DRAWS = 2
"""Times that a pair of the slowest group is drawn, on average, before the search ends without a gain."""

_USUAL_PASSES = 64
"""Passes of a stage from which on a search has fewer rounds: effort is time."""

_SLOT_TURN = 4
"""Every so many rounds exchanges of slots are tried first."""


class LocalSearch:
    """Samples in bins, `(group * num_slots + slot) * sync_size + column`, and the exact time of every sync group."""

    def __init__(self, batch: Batch, bin_of: Ints, num_slots: int, *, fixed_ranks: bool = False) -> None:
        """`fixed_ranks`: samples stay on their ranks."""
        self.batch, self.num_slots, self._fixed_ranks, self._counter = batch, num_slots, fixed_ranks, 0
        kinds, num_bins = batch.kinds or (batch,), batch.num_ranks * num_slots
        # Costs by kind of chunk, or by phase, of which the last has the work of experts.
        local = np.concatenate([kind.costs for kind in kinds])
        expert = np.zeros_like(local)
        self._per_microbatch, self._gather = np.zeros((2, len(local), 1, 1), dtype=np.int64)
        last = slice(len(batch.costs) - 1, None, len(batch.costs))
        # Single ranks of an expert group even out what they share as if it were local.
        (expert if batch.sync_size > 1 else local)[last] += [kind.expert_cost for kind in kinds]
        self._per_microbatch[last, 0, 0] = [kind.per_microbatch for kind in kinds]
        self._gather[last, 0, 0] = [kind.gather for kind in kinds]
        samples = np.concatenate([local, expert, batch.weights[None], np.ones((1, bin_of.size), dtype=np.int64)])
        self._samples = np.concatenate([samples, np.zeros((len(samples), num_bins), dtype=np.int64)], axis=1)
        self._bins: Ints = np.concatenate([bin_of, np.arange(num_bins)])  # of samples, and of each bin's ghost
        self._totals: Ints = np.stack([sums(values, bin_of, num_bins) for values in samples])
        self._place = np.tile(np.arange(num_slots), batch.num_groups)  # of each slot in the order of execution
        times = self._slot_times(self._totals[:-2].reshape(len(samples) - 2, 1, -1, batch.sync_size))
        self._times = times.reshape(-1, batch.num_groups, num_slots).swapaxes(0, 1).copy()
        self._ends = makespans(self._times, batch.waiting.pipeline)

    @property
    def time(self) -> int:
        """Of the slowest group."""
        return int(self._ends.max())

    @property
    def bin_of(self) -> Ints:
        """The bin of each sample, slots in the order of execution."""
        slot, column = np.divmod(self._bins[: self.batch.num_samples], self.batch.sync_size)
        return (slot // self.num_slots * self.num_slots + self._place[slot]) * self.batch.sync_size + column

    def improve(self, rounds: int) -> None:
        """Relieves the slowest group, so many times; fewer where a simulation takes long, or where no pair helps."""
        batch, best, last_gain = self.batch, self.time, 0
        num_passes = 2 * self.num_slots * batch.waiting.pipeline.num_chunks
        least = batch.min_time(self.num_slots)
        patience = _DRAWS * (batch.num_samples // batch.num_groups * self._bins.size // _PAIRS + 1)
        for turn in range(min(rounds, rounds * _USUAL_PASSES // num_passes + 1)):
            group = int(self._ends.argmax())
            if self._ends[group] < best:
                best, last_gain = self._ends[group], turn
            elif turn - last_gain > patience or best <= least + least // _NEAR:
                break
            if turn % _SLOT_TURN == 0 and batch.waiting.is_makespan and self.num_slots > 1:
                self._exchange_slots(group)
            self._exchange_samples(group)

    def _draw(self) -> Ints:
        """`[2, 2 * _PAIRS]` numbers below 2**31: splitmix64 of a counter (G. L. Steele et al., 2014)."""
        self._counter += 4 * _PAIRS
        state = np.arange(self._counter - 4 * _PAIRS, self._counter, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((state ^ (state >> np.uint64(31))) >> np.uint64(33)).astype(np.int64).reshape(2, -1)

    def _slot_times(self, totals: Ints) -> Ints:
        """`[num_kinds, ...]` time of slots whose bins hold `[2 * num_kinds, ..., sync_size]` costs and expert costs."""
        ep_dp_size, (loads, experts) = self.batch.ep_dp_size, np.split(totals, 2)
        if 1 < ep_dp_size <= self.batch.sync_size:
            shared = experts.reshape(*experts.shape[:-1], -1, ep_dp_size).sum(axis=-1)
            loads = loads + (-(-shared // ep_dp_size)).repeat(ep_dp_size, axis=-1)
        return np.maximum(loads.max(axis=-1) + self._per_microbatch, self._gather)

    def _exchange_slots(self, group: int) -> None:
        first, second = self._draw()[:, :_PAIRS] % self.num_slots
        pairs, times = np.arange(_PAIRS), np.tile(self._times[group], (_PAIRS, 1, 1))
        times[pairs, :, first], times[pairs, :, second] = times[pairs, :, second], times[pairs, :, first]
        ends = makespans(times, self.batch.waiting.pipeline)
        best = int(ends.argmin())
        if ends[best] < self._ends[group]:
            self._times[group], self._ends[group] = times[best], ends[best]
            place = self._place.reshape(-1, self.num_slots)[group]
            slots = np.argsort(place)[[first[best], second[best]]]
            place[slots] = place[slots[::-1]]

    def _exchange_samples(self, group: int) -> None:
        batch, width, n = self.batch, self.batch.sync_size, self.batch.num_samples
        first_bin, num_bins = group * self.num_slots * width, self.num_slots * width
        members = np.flatnonzero((self._bins[:n] >= first_bin) & (self._bins[:n] < first_bin + num_bins))
        if not members.size:
            return
        item, draw = self._draw()
        item, index = members[item % members.size], draw % (members.size + num_bins)
        mate = np.where(index < members.size, members[index % members.size], n + first_bin + index - members.size)
        anywhere = (np.arange(item.size) % 2 == 1) & (not self._fixed_ranks)
        partner = np.where(anywhere, draw % self._bins.size, mate)
        origin, target = self._bins[item], self._bins[partner]
        change = self._samples[:, item] - self._samples[:, partner]
        allowed = (origin != target) & (self._totals[-1, origin] > change[-1])
        weight = self._totals[-2]
        allowed &= (weight[target] + change[-2] <= batch.cap) & (weight[origin] - change[-2] <= batch.cap)
        if self._fixed_ranks:
            allowed &= origin % width == target % width
        pairs = np.flatnonzero(allowed)[:_PAIRS]
        if not pairs.size:
            return
        item, partner, origin, target, change = (
            values[..., pairs] for values in (item, partner, origin, target, change)
        )
        slots = np.stack([origin, target]) // width
        bins = slots[..., None] * width + np.arange(width)
        totals = self._totals[:-2, bins]
        added = (bins == target[:, None]).astype(np.int64) - (bins == origin[:, None])
        after = self._slot_times(totals + change[:-2, None, :, None] * added)
        groups, place, pairs = slots // self.num_slots, self._place[slots], np.arange(pairs.size)
        times = self._times[groups]
        for side in range(2):
            times[side, pairs, :, place[side]] = after[:, side].T
        same = np.flatnonzero(groups[0] == groups[1])
        times[0, same, :, place[1, same]] = after[:, 1, same].T
        times[1, same] = times[0, same]
        foreign = np.flatnonzero(groups[1] != group)
        ends = makespans(np.concatenate([times[0], times[1, foreign]]), batch.waiting.pipeline)
        both = np.tile(ends[: pairs.size], (2, 1))
        both[1, foreign] = ends[pairs.size :]
        best = int(both.max(axis=0).argmin())
        if both[:, best].max() >= self._ends[group] + batch.waiting.is_makespan:
            return
        self._bins[item[best]] = target[best]
        if partner[best] < n:
            self._bins[partner[best]] = origin[best]
        self._totals[:, origin[best]] -= change[:, best]
        self._totals[:, target[best]] += change[:, best]
        self._times[groups[:, best]], self._ends[groups[:, best]] = times[:, best], both[:, best]
