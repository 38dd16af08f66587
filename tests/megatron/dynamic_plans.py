"""Random plans of dynamic context parallelism: every one that keeps the invariants must train to the same result."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_balance.cost.model import CostModel
from megatron_balance.planner.dynamic_cp.groups import Groups
from megatron_balance.planner.dynamic_cp.sizing import size_samples
from megatron_balance.planner.dynamic_cp_schedule import DynamicCpSchedule
from megatron_balance.topology import Limits, Topology


def random_schedule(
    lengths: Any,
    *,
    topology: Topology,
    limits: Limits,
    cost_model: CostModel,
    num_segments: Any = None,
    home_ranks: Any = None,
    rows: int = 0,
    most: int = 4,
    seed: int = 1,
) -> DynamicCpSchedule:
    """A plan, checked; arguments as `build_data_schedule`.

    Args:
        rows: every leaf has a multiple of this number of slots, each a partition of the leaves; 0 for a tree, root
            first, with any number on each leaf.
        most: samples in a group.
        seed: of the draw.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    counts = None if num_segments is None else np.asarray(num_segments, dtype=np.int64)
    samples, shift = size_samples(lengths, cost_model=cost_model, topology=topology, limits=limits, num_segments=counts)
    draw = _Draw(samples, most=most, seed=seed)
    groups = draw.in_rows(rows) if rows else draw.on_tree()
    objective = "pipeline" if topology.pp_size > 1 else "microbatch" if rows else "step"
    return DynamicCpSchedule.of_groups(
        groups,
        lengths=lengths,
        num_segments=counts,
        home_ranks=home_ranks,
        samples=samples,
        cost_shift=shift,
        objective=objective,
        algorithm="random",
        lower_bound=0,
        topology=topology,
        limits=limits,
        cost_model=cost_model,
    ).check()


class _Draw:
    """Groups drawn at random: levels, first leaves and slots."""

    def __init__(self, samples: Any, *, most: int, seed: int) -> None:
        self._samples = samples
        self._most = most
        self._draw = random.Random(repr((seed, samples.tokens[0].tolist())))
        self._left = list(range(samples.num_samples))
        self._draw.shuffle(self._left)
        self._group_of = np.zeros(samples.num_samples, dtype=np.int64)
        self._groups: list[tuple[int, int, int]] = []
        self._num_slots = np.zeros(samples.num_leaves, dtype=np.int64)

    def on_tree(self) -> Groups:
        for level in range(self._samples.num_levels - 1, 0, -1):
            for first in range(0, self._samples.num_leaves - (1 << level) + 1, 1 << level):
                for _ in range(self._draw.choice((0, 1, 1, 2))):
                    self._place(level, first)
        while self._left:
            self._place(*self._fitting(self._draw.randrange(self._samples.num_leaves)))
        self._num_slots += 1  # a dummy: a group must be the last of all its leaves or of none, and no leaf is without
        return self._done()

    def in_rows(self, multiple: int) -> Groups:
        num_rows = 0
        while self._left or num_rows % multiple or not num_rows:
            first = 0
            while first < self._samples.num_leaves:
                levels = [
                    level
                    for level in range(self._samples.num_levels)
                    if first % (1 << level) == 0 and first + (1 << level) <= self._samples.num_leaves
                ]
                level = self._draw.choice(levels)
                self._place(level, first)
                first += 1 << level
            num_rows += 1
            self._num_slots[:] = num_rows
        return self._done()

    def _fitting(self, leaf: int) -> tuple[int, int]:
        """A group around a leaf that the next sample fits."""
        level = int(self._samples.least_levels[self._left[-1]])
        first = leaf >> level << level
        return level, min(first, (self._samples.num_leaves >> level << level) - (1 << level))

    def _place(self, level: int, first: int) -> None:
        taken = self._take(level)
        if not taken:
            return
        leaves = slice(first, first + (1 << level))
        slot = int(self._num_slots[leaves].max())
        self._group_of[taken] = len(self._groups)
        self._groups.append((level, first, slot))
        self._num_slots[leaves] = slot + 1

    def _take(self, level: int) -> Sequence[int]:
        tokens, room, taken = self._samples.tokens[level], self._samples.capacity, []
        for _ in range(self._draw.randint(1, self._most)):
            if not self._left:
                break
            sample = self._left[-1]
            alone = self._samples.oversized[sample] and level == self._samples.num_levels - 1
            if tokens[sample] > room and not (alone and not taken):
                break
            taken.append(self._left.pop())
            room -= tokens[sample]
        return taken

    def _done(self) -> Groups:
        levels, firsts, slots = np.array(self._groups, dtype=np.int64).reshape(-1, 3).T.copy()
        return Groups(self._group_of, levels, firsts, slots, self._num_slots)
