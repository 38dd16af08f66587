"""Local search on a packing: the best move or swap that relieves the slowest sync group, until none helps.

A move is a swap with a ghost: every bin offers one, which costs and weighs nothing. Each round compares all pairs at
once, and the search ends where no pair helps or where it has compared enough of them, so that the end does not depend
on the speed of the machine. No bin gets heavier than the cap, none is emptied, and the slowest group never gets slower.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatron_balance.planner.problem import INT_MAX, Ints, sums

if TYPE_CHECKING:
    from megatron_balance.planner.level_packing import Batch

_MAX_PAIRS = 1_000_000
"""Pairs that one search compares at most."""

_PARTNERS = 16
"""Groups, or bins of a single slot, that samples are exchanged with: those with least work."""


def equalize_phases(batch: Batch, bin_of: Ints) -> Ints:
    """Searches every slot by itself: it lasts as long as its longest encoder phase and its longest language phase."""
    bin_of, slot_of = bin_of.copy(), bin_of // batch.sync_size
    single = replace(batch, num_ranks=batch.sync_size, ep_dp_size=1)
    order = np.argsort(slot_of, kind="stable")
    for ids in np.split(order, np.flatnonzero(np.diff(slot_of[order])) + 1):
        first = bin_of[ids] // batch.sync_size * batch.sync_size
        bin_of[ids] = first + improve(single.take(ids), bin_of[ids] - first, 1)
    return bin_of


def improve(batch: Batch, bin_of: Ints, num_slots: int, *, goal: int = 0) -> Ints:
    """Lowers the time of the slowest group, down to `goal`. `bin_of`: `(group * slots + slot) * sync_size + column`.

    Slots add up; expert work counts where the whole slot shares it.
    """
    (phases, n), width, groups = batch.costs.shape, batch.sync_size, batch.num_groups
    num_bins = batch.num_ranks * num_slots
    cost = np.concatenate([batch.costs, np.zeros((phases, num_bins), dtype=np.int64)], axis=1)
    weight = np.concatenate([batch.weights, np.zeros(num_bins, dtype=np.int64)])
    expert = np.zeros(n + num_bins, dtype=np.int64)
    if batch.ep_dp_size == width:
        expert[:n] = batch.expert_cost
    elif width == 1:  # ranks of an expert group even out what they share as if it were local
        cost[0, :n] += batch.expert_cost
    bins: Ints = np.concatenate([bin_of, np.arange(num_bins)])
    load: Ints = np.stack([sums(phase, bin_of, num_bins) for phase in cost[:, :n]])
    room = batch.cap - sums(batch.weights, bin_of, num_bins)
    count = np.bincount(bin_of, minlength=num_bins)
    num_pairs = 0
    while n:
        if phases == 1 and width > 1:  # bins of each group stand by descending cost, cut into slots
            old = np.argsort(-load[0].reshape(groups, -1), axis=1, kind="stable")
            old = (old + np.arange(groups)[:, None] * (num_slots * width)).reshape(-1)
            new = np.argsort(old)
            bins, load, room, count = new[bins], load[:, old], room[old], count[old]
        cells = load.reshape(phases, -1, width)
        top = np.argsort(-cells, axis=2, kind="stable")[:, :, :3]
        high = np.take_along_axis(cells, top, axis=2)
        # Times are in units of 1/width of a cost, so that shared costs stay whole.
        slot_times = width * high[:, :, 0].sum(axis=0) + sums(expert, bins // width, groups * num_slots)
        times = slot_times.reshape(groups, num_slots).sum(axis=1)
        slowest = int(times.argmax())
        its_slots = np.arange(slowest * num_slots, (slowest + 1) * num_slots)
        is_longest = np.zeros(num_bins, dtype=np.bool_)
        is_longest[(top[:, its_slots, 0] + its_slots * width).reshape(-1)] = True
        movable = room[bins] >= 0
        items = np.flatnonzero(is_longest[bins[:n]] & movable[:n])
        partners = np.flatnonzero(_partner_bins(load, times, slowest=slowest, width=width)[bins] & movable)
        num_pairs += items.size * partners.size
        if not items.size or num_pairs > _MAX_PAIRS or times[slowest] <= width * goal:
            break
        source, target = bins[items][:, None], bins[partners][None]
        extra = weight[items][:, None] - weight[partners]
        allowed = (source != target) & (extra <= room[target]) & (-extra <= room[source])
        allowed &= (partners < n) | (count[source] > 1)
        from_slot, to_slot = source // width, target // width
        same = from_slot == to_slot
        lowered, raised = (np.zeros(extra.shape, dtype=np.int64) for _ in range(2))
        for phase in range(phases):
            difference = cost[phase, items][:, None] - cost[phase, partners]
            if phases == 1:
                allowed &= difference > 0
            smaller, larger = load[phase][source] - difference, load[phase][target] + difference
            peak = _highest_without(high[phase], top[phase], from_slot, source % width)
            joint = np.maximum(smaller, larger)
            if same.any():
                joint = np.maximum(
                    joint, _highest_without(high[phase], top[phase], from_slot, source % width, target % width)
                )
            lowered += high[phase][from_slot, 0] - np.where(same, joint, np.maximum(smaller, peak))
            peak = _highest_without(high[phase], top[phase], to_slot, target % width)
            raised += np.maximum(larger, peak) - high[phase][to_slot, 0]
        raised[same] = 0
        work = expert[items][:, None] - expert[partners]
        group = to_slot // num_slots
        after = times[slowest] - width * lowered + np.where(group == slowest, width * raised, -work)
        after = np.where(group == slowest, after, np.maximum(after, times[group] + width * raised + work))
        after[~allowed] = INT_MAX
        best = int(after.argmin())
        if after.flat[best] >= times[slowest]:
            break
        item, partner = items[best // partners.size], partners[best % partners.size]
        for index, sign in ((bins[item], -1), (bins[partner], 1)):
            load[:, index] += sign * (cost[:, item] - cost[:, partner])
            room[index] -= sign * (weight[item] - weight[partner])
            count[index] += sign * int(partner >= n)
        bins[item], ghost = bins[partner], bins[item]
        if partner < n:
            bins[partner] = ghost
    return bins[:n]


def _partner_bins(load: Ints, times: Ints, *, slowest: int, width: int) -> NDArray[np.bool_]:
    """`[num_bins]` bins that samples are exchanged with: those of the groups, or the bins, with least work."""
    groups, num_bins = times.size, load.shape[1]
    chosen = np.ones((groups, num_bins // groups), dtype=np.bool_)
    if groups > _PARTNERS:
        chosen[np.argsort(times, kind="stable")[_PARTNERS:]] = False
        chosen[slowest] = True
    elif num_bins == width > _PARTNERS:
        chosen[0] = False
        chosen[0, np.argsort(load, axis=1, kind="stable")[:, :_PARTNERS]] = True
    return chosen.reshape(-1)


def _highest_without(high: Ints, top: Ints, slot: Ints, column: Ints, second: Ints | None = None) -> Ints:
    """Load of a slot without one or two of its bins. `high`, `top`: `[slots, 3]` its highest bins, and which."""
    peak = np.zeros(np.broadcast_shapes(slot.shape, column.shape), dtype=np.int64)
    for index in reversed(range(high.shape[1])):
        candidate = top[slot, index]
        skipped = candidate == column
        if second is not None:
            skipped = skipped | (candidate == second)
        peak = np.where(skipped, peak, high[slot, index])
    return peak
