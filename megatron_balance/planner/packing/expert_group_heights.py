"""Target heights where groups of ranks meet by themselves and also share expert work.

A group takes as long as its rows are high, and longer by the shared work of all its samples. Where a large
sample makes a row high, the other micro-batches of the row may be filled up to the same height, in its *shade*,
at no cost but their shared work. So two prices are paid: in the shade a sample costs its group its shared work
only, elsewhere its own cost as well.

    1. a level is guessed that every group is to end at
    2. large samples, costliest first, go into the shade of the fullest group that stays below the level, or
       else start a row of the group that is least full
    3. all that is left is poured: into the shade at the lower price, into open rows at the full one
    4. the level is the least one below which everything fits, found by halving
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megatron_balance.planner.problem import Problem

MAX_LARGE = 256
"""Large samples that are placed one by one."""

PRECISION = 12
"""The level is within one part in `2**PRECISION` of the least one."""


@dataclass(frozen=True)
class _Large:
    """A large sample: what it costs its rank, what its group, and what other samples beside it may cost."""

    own: int
    shared: int
    beside: int


@dataclass
class _Group:
    """One group's high rows, with costs of its ranks together.

    Attributes:
        base: time that the large samples take, times the ranks of the group.
        rows: large samples of each high row, costliest first.
        shade: own cost that still fits into the high rows.
    """

    base: int = 0
    rows: list[list[_Large]] = field(default_factory=list[list["_Large"]])
    shade: int = 0


@dataclass(frozen=True)
class _Split:
    """Large samples, and what is left when they are placed.

    Attributes:
        large: large samples, costliest first.
        own: own cost of all others together.
        shared: shared cost of all others together.
        num_rows: rows of a group.
        span: ranks of a group.
        num_groups: groups.
        most: what a micro-batch without a large sample may cost, by its room.
    """

    large: list[_Large]
    own: int
    shared: int
    num_rows: int
    span: int
    num_groups: int
    most: int

    def shade(self, row: list[_Large], index: int) -> int:
        """Own cost that fits into a micro-batch of a high row, beside its large sample if it has one."""
        if index >= len(row):
            return min(row[0].own, self.most)
        return min(row[0].own - row[index].own, row[index].beside)


def slim_heights(problem: Problem, *, num_microbatches: int, sync_span: int) -> list[int]:
    """Target own cost of every micro-batch.

    Args:
        problem: the global batch.
        num_microbatches: rows of a group.
        sync_span: ranks of a group.

    Returns:
        `[num_groups * num_microbatches * sync_span]` costs, group by group and row by row, the high rows of a
        group first.
    """
    split = _split(problem, num_rows=num_microbatches, span=sync_span)
    low = max((sync_span * sample.own + sample.shared for sample in split.large), default=0)
    high = max(low, 1)
    groups = _place(split, high)
    while groups is None:
        low, high = high + 1, 2 * high
        groups = _place(split, high)
    while high - low > low >> PRECISION:
        middle = (low + high) // 2
        found = _place(split, middle)
        if found is None:
            low = middle + 1
        else:
            groups, high = found, middle

    heights: list[int] = []
    for group in groups:
        in_shade, in_open = _held(group, max(0, high - group.base), split=split)
        for row in group.rows:
            for index in range(sync_span):
                own = row[index].own if index < len(row) else 0
                heights.append(own + split.shade(row, index) * in_shade // max(group.shade, 1))
        num_open = (num_microbatches - len(group.rows)) * sync_span
        heights += [-(-in_open // num_open)] * num_open if num_open else []
    return heights


def _split(problem: Problem, *, num_rows: int, span: int) -> _Split:
    """Samples are large where they stand above the mean height of all micro-batches."""
    costs, shared = problem.costs, problem.shared_costs
    total_own, num_bins = int(costs.sum()), problem.topology.dp_size * num_rows
    costliest = np.argsort(-costs, kind="stable")[:MAX_LARGE]
    costliest = costliest[costs[costliest] > total_own // num_bins]
    rest = np.ones(costs.size, dtype=np.bool_)
    rest[costliest] = False
    # The densest of the rest go into the shade first; so much do they cost where they fill it.
    most, tokens = _densest(problem, rest, num_bins=max(costliest.size * (span - 1), 1))
    large = [
        _Large(
            int(costs[sample]),
            int(shared[sample]),
            max(0, problem.capacity - int(problem.weights[sample])) * most // tokens,
        )
        for sample in costliest.tolist()
    ]
    return _Split(
        large=large,
        own=total_own - sum(sample.own for sample in large),
        shared=int(shared.sum()) - sum(sample.shared for sample in large),
        num_rows=num_rows,
        span=span,
        num_groups=problem.topology.dp_size // span,
        most=problem.capacity * most // tokens,
    )


def _densest(problem: Problem, among: NDArray[np.bool_], *, num_bins: int) -> tuple[int, int]:
    """Own cost and room of the samples that fill `num_bins` micro-batches, by falling cost a token."""
    costs, weights = problem.costs[among], np.maximum(problem.weights[among], 1)
    order = np.argsort(-(costs / weights), kind="stable")
    sums = np.cumsum(weights[order])
    count = int(np.searchsorted(sums, num_bins * problem.capacity))
    taken = order[: count + 1]
    return int(costs[taken].sum()), max(int(weights[taken].sum()), 1)


def _place(split: _Split, level: int) -> list[_Group] | None:
    """Large samples in groups that end below the level; None where not everything fits."""
    groups = [_Group() for _ in range(split.num_groups)]
    for sample in split.large:
        shaded = [g for g in groups if g.rows and len(g.rows[-1]) < split.span and g.base + sample.shared <= level]
        if shaded:
            group = max(shaded, key=lambda g: g.base)
            group.rows[-1].append(sample)
            group.base += sample.shared
            continue
        group = min((g for g in groups if len(g.rows) < split.num_rows), key=lambda g: g.base, default=None)
        if group is None or group.base + split.span * sample.own + sample.shared > level:
            return None
        group.rows.append([sample])
        group.base += split.span * sample.own + sample.shared
    for group in groups:
        group.shade = sum(split.shade(row, index) for row in group.rows for index in range(split.span))
    held = sum(sum(_held(group, level - group.base, split=split)) for group in groups)
    return groups if held >= split.own else None


def _held(group: _Group, below: int, *, split: _Split) -> tuple[int, int]:
    """Own cost that a group takes below the level: in its shade, and in its open rows."""
    if split.own == 0:
        return 0, 0
    in_shade = min(group.shade, below * split.own // split.shared) if split.shared else group.shade
    if len(group.rows) == split.num_rows:
        return in_shade, 0
    paid = -(-in_shade * split.shared // split.own)
    return in_shade, max(0, below - paid) * split.own // (split.own + split.shared)
