"""Chooses the samples of the next global batch: a pool of `window` global batches, of which one leaves each step.

    1. samples arrive one by one and are numbered; sample `a` would leave at step `a // batch_size` in arrival order
    2. step `t` chooses among the arrivals below `(t + window) * batch_size` that have not left
    3. samples that would otherwise be late must leave: all of arrival step `t - window + 1`
    4. the rest is chosen by `pool_choice.py`, so that batches have similar costs

Invariants: every sample leaves exactly once, at most `window - 1` steps before or after its step in arrival order; a
batch has `batch_size` samples, but the last one at the end of data may have fewer; `window=1` is arrival order. The
choice depends on costs and arrival numbers alone, not on how they were pushed, so it is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError
from megatron_balance.planner.selection.pool_choice import CHOICES


@dataclass(frozen=True)
class LookAheadMetrics:
    """Figures of choosing ahead so far.

    Attributes:
        num_steps: batches that left.
        max_delay_steps: the latest that a sample left after its step in arrival order.
        mean_delay_steps: mean over all samples that left; one that left early counts as 0.
        drift: mean cost of a sample in the last batch over that of all samples that left. 1.0 is no drift.
    """

    num_steps: int
    max_delay_steps: int
    mean_delay_steps: float
    drift: float


class LookAhead:
    """A pool of samples from which global batches leave.

    Args:
        window: global batches in the pool; 1 is arrival order.
        batch_size: samples of a global batch (`global_batch_size`).
        dp_size: ranks that share a batch, from which an even share follows. At 1 no sample exceeds it.
        choice: `gather` or `spread`: a name in `CHOICES`.

    Raises:
        BalanceError: a number is below 1, or `choice` is unknown.

    Example:
        >>> ahead = LookAhead(2, batch_size=2)
        >>> ahead.push([9, 8, 1, 2])
        range(0, 4)
        >>> ahead.pop()
        array([0, 2])
    """

    def __init__(self, window: int, *, batch_size: int, dp_size: int = 1, choice: str = "gather") -> None:
        for name, value in (("window", window), ("batch_size", batch_size), ("dp_size", dp_size)):
            if isinstance(value, bool) or value < 1:
                raise BalanceError(f"LookAhead.{name} is {value!r}: it must be an integer of at least 1.")
        if choice not in CHOICES:
            raise BalanceError(f"LookAhead.choice is {choice!r}: it must be one of {', '.join(CHOICES)}.")
        self.window = window
        self.batch_size = batch_size
        self.dp_size = dp_size
        self.choice = choice
        self._pool: dict[int, int] = {}  # arrival number → cost, in order of arrival
        self._num_arrived = 0
        self._num_steps = 0
        self._drained = False
        self._num_left = 0
        self._max_delay = 0
        self._sum_delay = 0
        self._cost_left = 0
        self._last_cost = 0
        self._last_size = 0

    @property
    def num_missing(self) -> int:
        """Samples to push before a batch can leave; 0 at the end of data."""
        return 0 if self._drained else max((self._num_steps + self.window) * self.batch_size - self._num_arrived, 0)

    @property
    def num_waiting(self) -> int:
        """Samples in the pool."""
        return len(self._pool)

    def push(self, costs: Sequence[int] | NDArray[Any]) -> range:
        """Add samples.

        Args:
            costs: `[num_samples]` integers of any magnitude, in one unit throughout: tokens, or `CostModel(length)`.
                Not `CostModel.sample_costs`, which scales every batch on its own.

        Returns:
            The arrival numbers of the samples.

        Raises:
            BalanceError: a cost is negative or no integer, or data came after `drain`.
        """
        values = cast("list[Any]", costs.tolist() if isinstance(costs, np.ndarray) else list(costs))
        if self._drained and values:
            raise BalanceError("LookAhead.push after drain(): the end of data is known already.")
        for index, value in enumerate(values):
            if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)) or value < 0:
                raise BalanceError(f"costs[{index}] is {value!r}: it must be an integer of at least 0.")
        arrivals = range(self._num_arrived, self._num_arrived + len(values))
        self._pool.update(zip(arrivals, map(int, values), strict=True))
        self._num_arrived = arrivals.stop
        return arrivals

    def drain(self) -> None:
        """Declare the end of data: batches then leave until the pool is empty."""
        self._drained = True

    def pop(self) -> NDArray[np.int64]:
        """Take the next batch out of the pool.

        Returns:
            `[batch_size]` int64 arrival numbers, rising; fewer only in the last batch after `drain`.

        Raises:
            BalanceError: samples are missing, or the pool is empty at the end of data.
        """
        if self.num_missing or not self._pool:
            needed = f"push {self.num_missing} more samples, or drain()" if self.num_missing else "the data has ended"
            raise BalanceError(f"LookAhead.pop at step {self._num_steps}: {needed}.")
        chosen = sorted(self._choose())
        delays = [self._num_steps - arrival // self.batch_size for arrival in chosen]
        self._max_delay = max(self._max_delay, *delays)
        self._sum_delay += sum(delay for delay in delays if delay > 0)
        self._last_cost, self._last_size = sum(self._pool.pop(arrival) for arrival in chosen), len(chosen)
        self._cost_left += self._last_cost
        self._num_left += len(chosen)
        self._num_steps += 1
        return np.array(chosen, dtype=np.int64)

    def metrics(self) -> LookAheadMetrics:
        """Figures of the batches that left so far."""
        drift = 1.0
        if self._cost_left:
            drift = self._last_cost * self._num_left / (self._cost_left * self._last_size)
        return LookAheadMetrics(
            num_steps=self._num_steps,
            max_delay_steps=self._max_delay,
            mean_delay_steps=self._sum_delay / max(self._num_left, 1),
            drift=drift,
        )

    def state(self) -> dict[str, Any]:
        """Everything, as plain ints, strings and lists for a checkpoint.

        `arrivals` are the samples in the pool: a resumed run must load these again.
        """
        state = {name: value for name, value in vars(self).items() if name != "_pool"}
        return {
            **{name.removeprefix("_"): value for name, value in state.items()},
            "arrivals": list(self._pool),
            "costs": list(self._pool.values()),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> LookAhead:
        """The inverse of `state`.

        Raises:
            BalanceError: an entry is missing or unknown, or the pool does not hold all samples that have not left.
        """
        ahead = cls(1, batch_size=1)
        expected = ahead.state().keys()
        if state.keys() != expected:
            names = ", ".join(sorted(state.keys() ^ expected))
            raise BalanceError(f"LookAhead.from_state: {names} missing or unknown; was it saved by another version?")
        arrivals, costs, num_left = state["arrivals"], state["costs"], state["num_left"]
        if len(arrivals) != len(costs) or len(arrivals) + num_left != state["num_arrived"]:
            raise BalanceError(
                f"LookAhead.from_state: {len(arrivals)} arrivals, {len(costs)} costs and {num_left} samples that left "
                f"do not make {state['num_arrived']} that arrived."
            )
        ahead = cls(state["window"], batch_size=state["batch_size"], dp_size=state["dp_size"], choice=state["choice"])
        for name in vars(ahead):
            if name.startswith("_") and name != "_pool":
                setattr(ahead, name, state[name.removeprefix("_")])
        ahead._pool = dict(zip(arrivals, costs, strict=True))
        return ahead

    def _choose(self) -> list[int]:
        """Arrival numbers of the next batch, in any order."""
        stop = (self._num_steps + self.window) * self.batch_size
        pool = {arrival: cost for arrival, cost in self._pool.items() if arrival < stop}
        if len(pool) <= self.batch_size:
            return list(pool)
        must = [arrival for arrival in pool if arrival // self.batch_size + self.window - 1 <= self._num_steps]
        return CHOICES[self.choice](pool, must=must, count=self.batch_size, dp_size=self.dp_size)
