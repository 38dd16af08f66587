"""Keeps plans within a share of a step: all ranks change to cheaper plans together, where planning takes longer.

    1. each rank sends the share of a step that its plans took, with the lengths of its samples
    2. all ranks of a data-parallel group see the same largest share; where it is above `MAX_SHARE`, the level of later
       plans (`build_data_schedule`) rises by one
    3. the first rank of each replica passes the level on with the step: these ranks are one data-parallel group, so
       that stages with groups of their own plan at the same level

One slow plan or one short step changes nothing: the shortest of `NUM_JUDGED` plans is compared with the longest of as
many steps. A level never falls. It is in no checkpoint: a resumed run begins at 0, which means by size alone.
"""

from __future__ import annotations

from collections import deque

from megatron_balance.planner.problem import CHEAPEST_LEVEL

MAX_SHARE = 100
"""Of a step, in thousandths."""

NUM_JUDGED = 4
"""Plans of a level, and steps, that are measured before the level may rise."""


class PlanBudget:
    """The level of this rank's plans.

    Args:
        fixed: the level stays 0: plans have no levels, or runs must be reproducible.

    Attributes:
        level: of the next plan; the same on all ranks.
    """

    def __init__(self, *, fixed: bool) -> None:
        self.level = 0
        self._fixed = fixed
        self._plans: deque[float] = deque(maxlen=NUM_JUDGED)
        self._steps: deque[float] = deque(maxlen=NUM_JUDGED)
        self._last: tuple[int, float] | None = None

    def begin_step(self, step: int, *, seconds: float) -> None:
        """Note the time at which preparing a step begins; of a step that is made again, the first time.

        Args:
            step: counted from 0.
            seconds: of a monotonic clock.
        """
        if self._last is None or step > self._last[0]:
            if self._last is not None and step == self._last[0] + 1:
                self._steps.append(seconds - self._last[1])
            self._last = (step, seconds)

    def add_plan(self, seconds: float) -> None:
        """Note the time that a plan took."""
        self._plans.append(seconds)

    @property
    def share(self) -> int:
        """Thousandths of a step that plans take on this rank, at least 1; 0 until enough is measured."""
        if self._fixed or len(self._plans) < NUM_JUDGED or len(self._steps) < NUM_JUDGED:
            return 0
        return max(1, int(1000 * min(self._plans) / max(self._steps)))

    def next_level(self, share: int) -> int:
        """The level of later plans, for the largest share of all ranks."""
        return min(self.level + (share > MAX_SHARE), CHEAPEST_LEVEL)

    def use(self, level: int) -> None:
        """Plan at this level from now on, on every rank."""
        if level != self.level:
            self.level = level
            self._plans.clear()
