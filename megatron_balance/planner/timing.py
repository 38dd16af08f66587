"""The time of a step over the micro-batches of ranks that meet: their sum, or the makespan of a pipeline.

Everything that packing does otherwise in a pipeline is asked here: how many micro-batches are worth trying, how
steeply their targets fall, and in which order they run.
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
"""Micro-batches beyond the fewest that a pipeline is tried with where they cost nothing besides: with a cost that is
free of launches nothing else would end it."""


class Timing(ABC):
    """How micro-batches make up a step, and what packing aims at."""

    slopes: tuple[int, ...] = (0,)
    """Steepness of the targets that are tried where ranks do not meet in micro-batches, see `packing.rank_levels`."""

    fills: tuple[bool, ...] = (True,)
    """Whether samples stand beside one that makes a row of ranks that meet high: the ways that are tried."""

    max_tried: int | None = None
    """Numbers of micro-batches that are tried."""

    max_lost: int | None = None
    """Numbers in a row that were no better than the best before the search ends."""

    @property
    def stages(self) -> int:
        """A group that has this much less work ends one unit of time earlier."""
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
            work: what its micro-batches cost together at least.
            launch: cost of an empty micro-batch.
            longest: cost of its costliest micro-batch at least.
        """

    @abstractmethod
    def slot_order(self, costs: NDArray[np.int64]) -> NDArray[np.int64]:
        """The micro-batch that each slot takes, `[num_ranks, num_microbatches]` for costs of that shape."""

    @abstractmethod
    def counts(self, fewest: int, *, most: int, multiple: int, work: int, launch: int) -> Iterable[int]:
        """Numbers of micro-batches to try, rising.

        Args:
            fewest: that could hold the samples, a multiple of `multiple`; it is tried in any case.
            most: beyond which there would be more slots than samples, a multiple of `multiple`.
            multiple: of every number.
            work: cost of a rank's samples.
            launch: cost of an empty micro-batch.
        """


class Sum(Timing):
    """Micro-batches one after another; only their sum counts."""

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

    Of M even micro-batches of a rank's work W, each of which costs c besides, a pipeline of p stages makes

        (W/M + c) * (M + p - 1) / p

    which is least at M = sqrt(W * (p-1) / c): before, the bubble costs more than more micro-batches do, and behind
    less. Uneven ones in the order of a mountain fill and drain the pipeline with less work, which takes a quarter or
    more off the bubble. How uneven is best depends on how many there are to a stage, and what samples and the cap
    allow is not known before it is tried.

    Attributes:
        pp_size: stages.
        vpp_size: model chunks a stage.
    """

    pp_size: int
    vpp_size: int

    # The highest micro-batch as costly as the lowest, or six times so; slopes between hardly ever gave less.
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
        """A stage's work, and the idling of both its ends: at least an empty micro-batch on the other stages."""
        idle = (self.pp_size - 1) * launch
        return max(-(-(work * self.vpp_size + idle) // (self.pp_size * self.vpp_size)), longest)

    def slot_order(self, costs: NDArray[np.int64]) -> NDArray[np.int64]:
        """A mountain."""
        return mountain_order(costs)

    def counts(self, fewest: int, *, most: int, multiple: int, work: int, launch: int) -> Iterable[int]:
        """The fewest and the next, then each half as many again, and the best of even ones."""
        pays = MAX_TIMES_FEWEST * fewest
        if launch:
            pays = isqrt(work * (self.pp_size - 1) // (launch * self.vpp_size)) + 1
        most = min(most, pays // multiple * multiple)
        counts = [fewest, fewest + multiple]
        while counts[-1] < most:
            counts.append(min(max(-(-counts[-1] * 3 // (2 * multiple)) * multiple, counts[-1] + multiple), most))
        return counts
