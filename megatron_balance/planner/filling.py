"""Replaces the dummies of a plan by samples, for executors without dummies.

    1. an empty place takes the cheapest sample of a micro-batch that holds several: under `step` preferably one of the
       same leaf, whose sum then stays unchanged, else any
    2. if no such sample is left, groups of the slot grow over the empty leaves, the costliest first, within the
       smallest block of leaves that has one; a slot without groups first receives one from the slot with most groups
    3. if that increases the time under `step`, rows are tried as well, as they have few empty places

A group cannot grow beyond the largest size or over leaves that are no power of two, and there may be fewer samples
than slots. The remaining empty places stay dummies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_balance.planner.dynamic_cp import SizedBatch
from megatron_balance.planner.dynamic_plan import SizedPlan, plan_in_rows
from megatron_balance.planner.schedule import DataSchedule


def fill_dummies(schedule: DataSchedule, *, other_slots: int = 0) -> DataSchedule:
    """The plan with samples in place of dummies, as far as possible.

    Args:
        schedule: a plan with context-parallel sizes of its own.
        other_slots: additional slots of every leaf; the total is a multiple of `microbatch_multiple`.
    """
    batch = schedule.batch()
    assert isinstance(batch, SizedBatch), "plans at one size have no dummies to fill"
    own = SizedPlan(schedule.slot_of, schedule.cp_size_grid)
    filled = _fill(schedule, own, batch=batch, other_slots=other_slots)
    if filled.predicted_cost == schedule.predicted_cost or schedule.objective != "step" or not batch.num_samples:
        return filled
    rows = plan_in_rows(batch, floor=batch.least_work())
    in_rows = _fill(schedule, rows, batch=batch, other_slots=other_slots)
    return min(filled, in_rows, key=lambda plan: (int((plan.slot_counts() == 0).sum()), plan.predicted_cost))


def _fill(schedule: DataSchedule, plan: SizedPlan, *, batch: SizedBatch, other_slots: int) -> DataSchedule:
    """The schedule with these micro-batches, filled."""
    num_slots = plan.cp_sizes.shape[1] + other_slots
    filling = _Filling(batch, plan, -(-num_slots // batch.multiple) * batch.multiple - other_slots)
    filling.move_samples(own_leaf_first=schedule.objective == "step")
    filling.grow_groups()
    return schedule.with_plan(filling.plan())


@dataclass(eq=False)
class _Pack:
    """A micro-batch: `ids` on the leaves `[first, first + 2**level)`."""

    level: int
    first: int
    ids: list[int]

    @property
    def end(self) -> int:
        return self.first + (1 << self.level)


class _Filling:
    """The micro-batches of every slot while empty places are being filled."""

    def __init__(self, batch: SizedBatch, plan: SizedPlan, num_slots: int) -> None:
        self._batch = batch
        self._num_leaves, most = (int(size) for size in plan.cp_sizes.shape)
        self._slots: list[list[_Pack]] = [[] for _ in range(num_slots)]
        packs: dict[int, _Pack] = {}
        self._pack_of: list[_Pack] = []
        sizes: list[int] = plan.cp_sizes.reshape(-1).tolist()
        places: list[int] = plan.slot_of.tolist()
        for sample, place in enumerate(places):
            if place not in packs:
                packs[place] = _Pack(sizes[place].bit_length() - 1, place // most, [])
                self._slots[place % most].append(packs[place])
            packs[place].ids.append(sample)
            self._pack_of.append(packs[place])

    def move_samples(self, *, own_leaf_first: bool) -> None:
        """Gives empty places single samples that fit one leaf, cheapest first."""
        small = np.flatnonzero(self._batch.least_levels == 0)
        order: list[int] = small[np.argsort(self._batch.costs[0, small], kind="stable")].tolist()
        of_leaves: list[list[int]] = [[] for _ in range(self._num_leaves)]
        for sample in order if own_leaf_first else ():
            if self._pack_of[sample].level == 0:
                of_leaves[self._pack_of[sample].first].append(sample)
        donors = [self._donors(ids) for ids in of_leaves]
        any_donors = self._donors(order)
        for packs in self._slots:
            for leaf in self._empty_leaves(packs):
                sample = next(donors[leaf], None)
                if sample is None:
                    sample = next(any_donors, None)
                if sample is None:
                    break
                self._pack_of[sample].ids.remove(sample)
                self._pack_of[sample] = _Pack(0, leaf, [sample])
                packs.append(self._pack_of[sample])

    def grow_groups(self) -> None:
        """Grows groups over the remaining empty places."""
        for packs in self._slots:
            if not packs:
                self._move_group(packs)
        for packs in self._slots:
            growing = True
            while growing and (empty := self._empty_leaves(packs)):
                growing = self._grow_one(packs, leaf=empty[0])

    def _donors(self, ids: Sequence[int]) -> Iterator[int]:
        """The samples that share their micro-batch at the time they are drawn."""
        return (sample for sample in ids if len(self._pack_of[sample].ids) > 1)

    def _empty_leaves(self, packs: Sequence[_Pack]) -> list[int]:
        empty = np.ones(self._num_leaves, dtype=bool)
        for pack in packs:
            empty[pack.first : pack.end] = False
        return np.flatnonzero(empty).tolist()

    def _move_group(self, packs: list[_Pack]) -> None:
        """Moves the cheapest group of the slot with most groups to a slot without any."""
        donor = max(self._slots, key=len)
        if len(donor) > 1:
            packs.append(min(donor, key=self._cost))
            donor.remove(packs[0])

    def _grow_one(self, packs: list[_Pack], *, leaf: int) -> bool:
        """Doubles the costliest group that may grow, in the smallest block around an empty leaf that has one."""
        for width in range(1, self._num_leaves.bit_length()):
            first = leaf >> width << width
            end = first + (1 << width)
            if end > self._num_leaves:
                break
            block = [pack for pack in packs if first <= pack.first < end]
            spare = (1 << width) - sum(1 << pack.level for pack in block)
            able = [pack for pack in block if 1 << pack.level <= spare and self._may_double(pack)]
            if not able:
                continue
            max(able, key=lambda pack: (self._cost(pack), -pack.first)).level += 1
            # The largest first, so that every group starts at a multiple of its size.
            for pack in sorted(block, key=lambda pack: (-pack.level, pack.first)):
                pack.first = first
                first = pack.end
            return True
        return False

    def _cost(self, pack: _Pack) -> int:
        return int(self._batch.costs[pack.level, pack.ids].sum())

    def _may_double(self, pack: _Pack) -> bool:
        level = pack.level + 1
        return level < self._batch.num_levels and int(self._batch.tokens[level, pack.ids].sum()) <= self._batch.cap

    def plan(self) -> SizedPlan:
        """The micro-batches as a plan; what is still empty is a dummy."""
        num_slots = len(self._slots)
        slot_of = np.zeros(self._batch.num_samples, dtype=np.int64)
        sizes = np.ones((self._num_leaves, num_slots), dtype=np.int64)
        for slot, packs in enumerate(self._slots):
            for pack in packs:
                sizes[pack.first : pack.end, slot] = 1 << pack.level
                slot_of[pack.ids] = pack.first * num_slots + slot
        return SizedPlan(slot_of, sizes)
