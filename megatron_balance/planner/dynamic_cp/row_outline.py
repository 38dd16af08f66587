"""Outlines of rows: their number, a limit on the cost of a sample per rank, and an estimate of their heights.

In a row all leaves meet, so it takes as long as its costliest group. An outline fixes the number of rows and the most
that a sample may cost a rank. Samples above the common height of rows open high rows, costliest first; other samples
fill the remaining leaves. Outlines treat samples as divisible, so each takes microseconds and many are compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from megatron_balance.planner.dynamic_cp.bound import least_rows
from megatron_balance.planner.dynamic_cp.samples import SizedSamples

_LIMITS = (0.3, 0.5, 0.7, 0.85, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.8, 2.0, 2.5, 3.0, 4.0, 6.0, 9.0)
"""Limits to try, in mean heights of a row."""

_MORE_ROWS = (17, 18, 20, 22, 24)
"""Numbers of rows to try, in sixteenths of the least number."""

_FEW_ROWS = 8
"""If the least number of rows is below this, every number up to five more is tried."""


_PIPELINE_ROWS = (2, 3, 4, 6, 8, 12, 16)
"""Additional numbers of rows to try in a pipeline, in multiples of the least: more rows idle less."""

_NO_ROWS = Fraction(0)


@dataclass(frozen=True)
class RowOutline:
    """Estimate for one number of rows and one limit.

    Attributes:
        time: sum of the heights of rows, fixed costs included, plus the idle time of a pipeline.
        num_rows: rows.
        limit: cost on each rank above which a sample is shared by more ranks.
        height: cost of the rows without a costlier sample.
    """

    time: int
    num_rows: int
    limit: int
    height: int


def row_outlines(
    samples: SizedSamples, *, floor: int, multiple: int, idle_rows: Fraction = _NO_ROWS
) -> list[RowOutline]:
    """Outlines to try, the most promising first.

    Args:
        samples: the global batch.
        floor: a lower bound on the time.
        multiple: rows are a multiple of this.
        idle_rows: rows during which a pipeline's stage idles at its ends.
    """
    profile = _Profile(samples, idle_rows=idle_rows)
    least = -(-least_rows(samples) // multiple)
    numbers = {least, least + 1} | {-(-least * sixteenths // 16) for sixteenths in _MORE_ROWS}
    if least < _FEW_ROWS:
        numbers |= set(range(least, least + 6))
    if idle_rows:
        numbers |= {least * more for more in _PIPELINE_ROWS}
    outlines: dict[tuple[int, int], RowOutline] = {}
    for num_rows in sorted(number * multiple for number in numbers):
        for part in _LIMITS:
            outline = profile.outline(num_rows, limit=int(part * floor / num_rows))
            if outline is not None:
                # Limits with the same sizes of samples give the same outline.
                outlines.setdefault((outline.num_rows, outline.time), outline)
    return sorted(outlines.values(), key=lambda outline: (outline.time, outline.num_rows, outline.limit))


class _Profile:
    """Sums over the samples by falling cost, from which outlines are made."""

    def __init__(self, samples: SizedSamples, *, idle_rows: Fraction) -> None:
        self._samples = samples
        self._idle_rows = idle_rows
        self._order = np.argsort(-samples.least_costs, kind="stable")
        self._rising = -samples.least_costs[self._order]
        self._areas = _sums(samples.least_costs[self._order] << samples.least_levels[self._order])
        # Cumulative cost and tokens of the samples that fit one rank, costliest first.
        alone = samples.least_levels[self._order] == 0
        self._num_alone = _sums(alone.astype(np.int64))
        self._costs = _sums(samples.costs[0, self._order[alone]])
        self._tokens = _sums(samples.tokens[0, self._order[alone]])

    def outline(self, num_rows: int, *, limit: int) -> RowOutline | None:
        """The outline of a number of rows under a limit, or None if there are more high rows than that."""
        num_leaves = self._samples.num_leaves
        num_raised = self._num_above(limit)
        levels, costs = self._samples.raised(self._order[:num_raised], height=limit)
        area = int(self._areas[-1] - self._areas[num_raised] + (costs << levels).sum())
        height = area // (num_rows * num_leaves)
        # Rows become lower than that if high rows hold more than their share.
        others = self._order[num_raised : self._num_above(height // 2)]
        levels = np.concatenate([levels, self._samples.least_levels[others]])
        costs = np.concatenate([costs, self._samples.least_costs[others]])
        by_cost = np.argsort(-costs, kind="stable")
        levels, costs = levels[by_cost], costs[by_cost]
        ends, areas = np.cumsum(1 << levels), np.cumsum(costs << levels)
        high = np.zeros(0, dtype=np.int64)
        while True:
            held = 0
            num_high = int(np.searchsorted(-costs, -height))
            if num_high:
                num_high_rows = -(-int(ends[num_high - 1]) // num_leaves)
                high = costs[np.searchsorted(ends, np.arange(num_high_rows) * num_leaves, side="right")]
                spare = num_high_rows * num_leaves - int(ends[num_high - 1])
                held = int(areas[num_high - 1]) + min(spare * int(high[-1]), self._most_cost(height, leaves=spare))
            num_low = num_rows - high.size
            if num_low < 0 or (num_low == 0 and held < area):
                return None
            lower = max(area - held, 0) // (num_low * num_leaves) if num_low else 0
            if lower >= height - height // 1024 or not num_low:
                idle = int(self._idle_rows * (height + self._samples.per_microbatch))
                time = int(high.sum()) + num_low * height + num_rows * self._samples.per_microbatch + idle
                return RowOutline(time, num_rows=num_rows, limit=limit, height=height)
            height = lower

    def _num_above(self, cost: int) -> int:
        return int(np.searchsorted(self._rising, -cost))

    def _most_cost(self, height: int, *, leaves: int) -> int:
        """The most cost that leaves can hold by tokens, of samples that cost up to `height`."""
        first = self._num_alone[self._num_above(height)]
        room = leaves * self._samples.capacity
        last = int(np.searchsorted(self._tokens, self._tokens[first] + room, side="right")) - 1
        return int(self._costs[last] - self._costs[first])


def _sums(values: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(values)])
