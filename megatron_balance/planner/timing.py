"""The time of a step over the micro-batches of ranks that meet: their sum, or the makespan of a pipeline.

A timing also holds the choices that packing makes differently in a pipeline: the numbers of micro-batches to try, the
slope of their target costs, and their order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from megatron_balance.planner.makespan import mountain_order, pipeline_makespans

MAX_TIMES_FEWEST = 4
"""Most micro-batches to try in a pipeline, in multiples of the fewest, if a micro-batch has no fixed cost: nothing else
limits their number then."""


class Timing(ABC):
    """The time of a step as a function of its micro-batches, and the targets of packing."""

    slopes: tuple[int, ...] = (0,)
    """Slopes of target costs to try if ranks do not meet in micro-batches, see `packing.rank_levels`."""

    fills: tuple[bool, ...] = (True,)
    """Variants to try: True fills rows that one costly sample makes high with other samples, False leaves them."""

    max_tried: int | None = None
    """Most numbers of micro-batches to try; None for no limit."""

    max_lost: int | None = None
    """Consecutive numbers without an improvement after which the search ends; None for no limit."""

    @property
    def stages(self) -> int:
        """Work per unit of time: a group with this much less work ends one unit earlier."""
        return 1

    @abstractmethod
    def times(self, of_groups: NDArray[np.int64]) -> NDArray[np.int64]:
        """Time of each group, `[num_groups]`, for `[num_groups, num_microbatches]` costs in slot order."""

    def time(self, of_groups: NDArray[np.int64]) -> int:
        """Time of the slowest group."""
        return int(self.times(of_groups).max())

    @abstractmethod
    def at_least(self, work: int, *, launch: int, longest: int = 0) -> int:
        """Lower bound on the time of a group.

        Args:
            work: lower bound on the summed cost of its micro-batches.
            launch: cost of an empty micro-batch.
            longest: lower bound on the cost of its costliest micro-batch.
        """

    @abstractmethod
    def slot_order(self, costs: NDArray[np.int64]) -> NDArray[np.int64]:
        """The micro-batch in each slot, `[num_ranks, num_microbatches]` for costs of that shape."""

    @abstractmethod
    def counts(self, fewest: int, *, most: int, multiple: int, work: int, launch: int) -> Iterable[int]:
        """Numbers of micro-batches to try, ascending.

        Args:
            fewest: smallest number that may hold the samples, a multiple of `multiple`; it is always tried.
            most: largest number without more slots than samples, a multiple of `multiple`.
            multiple: every number is a multiple of this.
            work: cost of a rank's samples.
            launch: cost of an empty micro-batch.
        """


class Sum(Timing):
    """Micro-batches run one after another; the time is their sum."""

    max_tried = 3

    def times(self, of_groups: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `Timing`."""
        return of_groups.sum(axis=1)

    def at_least(self, work: int, *, launch: int, longest: int = 0) -> int:
        """See `Timing`."""
        return max(work, longest)

    def slot_order(self, costs: NDArray[np.int64]) -> NDArray[np.int64]:
        """By falling cost, so that ranks have equal slots."""
        return np.argsort(-costs, axis=1, kind="stable")

    def counts(self, fewest: int, *, most: int, multiple: int, work: int, launch: int) -> Iterable[int]:
        """The fewest and those that follow."""
        return range(fewest, max(fewest, most) + 1, multiple)


@dataclass(frozen=True)
class Makespan(Timing):
    """Micro-batches pass the stages of a pipeline, which idle while it fills and drains.

    With a rank's work W in M even micro-batches, each with a fixed cost c, a pipeline of p stages takes

        (W/M + c) * (M + p - 1) / p

    which is least at M = sqrt(W * (p-1) / c): below, more micro-batches shrink the bubble by more than their fixed
    cost, above by less. Uneven micro-batches in mountain order fill and drain the pipeline with less work, which
    shortens the bubble by a quarter or more. The best slope depends on the number of micro-batches per stage and on
    the samples and the cap, so several are tried.

    Attributes:
        pp_size: stages.
        vpp_size: model chunks per stage.
    """

    pp_size: int
    vpp_size: int

    # The costliest micro-batch costs as much as the cheapest, or six times as much; other slopes rarely gave less.
    slopes = (0, 5)
    fills = (True, False)
    max_lost = 2

    @property
    def stages(self) -> int:
        """See `Timing`."""
        return self.pp_size

    def times(self, of_groups: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `Timing`."""
        return pipeline_makespans(of_groups, pp_size=self.pp_size, vpp_size=self.vpp_size)

    def at_least(self, work: int, *, launch: int, longest: int = 0) -> int:
        """A stage's work plus its idle time at both ends: at least one empty micro-batch on each other stage."""
        idle = (self.pp_size - 1) * launch
        return max(-(-(work * self.vpp_size + idle) // (self.pp_size * self.vpp_size)), longest)

    def slot_order(self, costs: NDArray[np.int64]) -> NDArray[np.int64]:
        """Mountain order: the costliest in the middle."""
        return mountain_order(costs)

    def counts(self, fewest: int, *, most: int, multiple: int, work: int, launch: int) -> Iterable[int]:
        """The fewest and the next, then each 1.5 times the last, up to the best number of even micro-batches."""
        pays = MAX_TIMES_FEWEST * fewest
        if launch:
            pays = isqrt(work * (self.pp_size - 1) // (launch * self.vpp_size)) + 1
        most = min(most, pays // multiple * multiple)
        counts = [fewest, fewest + multiple]
        while counts[-1] < most:
            counts.append(min(max(-(-counts[-1] * 3 // (2 * multiple)) * multiple, counts[-1] + multiple), most))
        return counts
