"""Trains on one global batch again and again, its steps prepared by turns: run by overhead.py.

    torchrun … -m megatron_balance.launch --cpu benchmarks/soak/alternating.py RECORD_DIR ARGS

In an *on* step everything of balancing runs: the next step's data is gathered, planned, moved and packed by the
thread, waited for at the end, and the step is watched. In an *off* step the micro-batches of before are handed on
and nothing else happens. The micro-batches are the same in all steps. Each rank writes RECORD_DIR/rankN.jsonl, a line
a step, from the moment it has its data to the moment the next step has its own.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TextIO

from record_steps import train_wrapped

from benchmarks.metrics import WATCHED, same_batch_again
from benchmarks.metrics.watched import Metered
from megatron_balance.hooking.patches import Function
from megatron_balance.mcore import hooks
from megatron_balance.mcore.step.balanced_step import BalancedStep
from megatron_balance.mcore.step.prefetcher import StepPrefetcher


def main() -> None:
    """Record while the script trains."""
    train_wrapped(
        _alternating,
        why="feeds every step the same data and puts the prefetcher that takes turns in place",
        parameters=("data_iterator",),
    )


def _alternating(train_step: Function, *, out: TextIO) -> Function:
    data: list[Any] = []

    @functools.wraps(train_step)
    def wrapper(forward_step_func: Any, data_iterator: Any, *rest: Any, **keywords: Any) -> Any:
        if not data:
            data.append(same_batch_again(data_iterator))
        balanced = hooks.current()
        if balanced is not None and isinstance(balanced.prefetcher, StepPrefetcher):
            turns = TakesTurns(balanced.prefetcher, observer=balanced.observer, out=out)
            turns.hand_observer = functools.partial(setattr, balanced, "observer")
            balanced.prefetcher = turns  # type: ignore[assignment]
        return train_step(forward_step_func, data[0], *rest, **keywords)

    return wrapper


class TakesTurns:
    """A run's prefetcher that works in some steps only, with a meter on what it does.

    Args:
        prefetcher: does the work.
        observer: watches the steps in which it works.
        out: where lines go.

    Attributes:
        planner: of the prefetcher.
        hand_observer: makes its argument the run's observer.
    """

    def __init__(self, prefetcher: StepPrefetcher, *, observer: Any, out: TextIO) -> None:
        self.hand_observer: Callable[[Any], None] = lambda observer: None
        self._inner = prefetcher
        self._observer = Metered(observer)
        self._out = out
        self._steps = itertools.count()
        self._on = True
        self._last: BalancedStep | None = None
        self._began = (0.0, 0.0)
        self._cpu_seconds = 0.0
        self.planner = prefetcher.planner
        self.planner.make = self._metered(self.planner.make)  # type: ignore[method-assign]
        self.planner.prepare = self._metered(self.planner.prepare)  # type: ignore[method-assign]

    def balance(self, data_iterator: Any, *, num_microbatches: int) -> Any:
        """As the prefetcher's, or the last step again."""
        exposed = 0.0
        if self._on or self._last is None:
            with self._metering():
                step = self._inner.balance(data_iterator, num_microbatches=num_microbatches)
            assert isinstance(step, BalancedStep)
            exposed = step.exposed_seconds
        else:
            step = replace(self._last, exposed_seconds=0.0)
        now = time.perf_counter(), time.process_time()
        if self._last is not None:
            row = {"on": self._on, "seconds": now[0] - self._began[0], "cpu_seconds": now[1] - self._began[1]}
            row |= {"exposed_seconds": exposed, "balancing_cpu_seconds": self._cpu_seconds + self._observer.read()}
            row |= {"plan_seconds": step.plan_seconds, "exchange_seconds": step.exchange_seconds}
            print(json.dumps(row), file=self._out, flush=True)
        self._last, self._cpu_seconds = step, 0.0
        self._on = WATCHED[next(self._steps) % len(WATCHED)]
        self.hand_observer(self._observer if self._on else None)
        self._began = time.perf_counter(), time.process_time()
        return step

    def prepare(self, data_iterator: Any, **arguments: Any) -> None:
        """As the prefetcher's, or nothing."""
        if self._on:
            with self._metering():
                self._inner.prepare(data_iterator, **arguments)

    def _metered(self, make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def metered(*positional: Any, **keywords: Any) -> Any:
            with self._metering():
                return make(*positional, **keywords)

        return metered

    @contextlib.contextmanager
    def _metering(self) -> Iterator[None]:
        """CPU seconds of this thread; the main one waits while the other adds its own."""
        began = time.thread_time()
        try:
            yield
        finally:
            self._cpu_seconds += time.thread_time() - began


if __name__ == "__main__":
    main()
