"""Trains with the same global batch in every step, watched in some steps and unwatched in others: run by __main__.py.

    torchrun … -m megatron_balance.launch --cpu benchmarks/metrics/watched.py RECORD_DIR ARGS

Each rank writes RECORD_DIR/rankN.jsonl, a line a step: CPU seconds from the beginning of the step to that of the next,
Megatron's log and ours included, whether it was watched, and the CPU seconds that were spent watching.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from record_steps import train_wrapped

from benchmarks.metrics import WATCHED, same_batch_again
from megatron_balance.hooking.patches import Function
from megatron_balance.mcore import hooks
from megatron_balance.mcore.step.balanced_step import BalancedStep
from megatron_balance.mcore.telemetry.observer import RunObserver


def main() -> None:
    """Record while the script trains."""
    train_wrapped(
        _alternating,
        why="times a step with all that follows it, and feeds it the same data again",
        parameters=("data_iterator",),
    )


def _alternating(train_step: Function, *, out: TextIO) -> Function:
    steps = itertools.count()
    data: list[Any] = []
    metered: list[Metered] = []
    began = time.process_time()

    @functools.wraps(train_step)
    def wrapper(forward_step_func: Any, data_iterator: Any, *rest: Any, **keywords: Any) -> Any:
        nonlocal began
        now, step = time.process_time(), next(steps)
        if not data:
            data.append(same_batch_again(data_iterator))
        balanced = hooks.current()
        if step and balanced is not None:
            if not metered:
                metered.append(Metered(balanced.observer))
            row = {"watched": WATCHED[(step - 1) % len(WATCHED)], "cpu_seconds": now - began}
            print(json.dumps(row | {"watching_cpu_seconds": metered[0].read()}), file=out, flush=True)
            balanced.observer = metered[0] if WATCHED[step % len(WATCHED)] else None
        began = time.process_time()
        return train_step(forward_step_func, data[0], *rest, **keywords)

    return wrapper


class Metered:
    """A run's observer, and the CPU seconds of its calls."""

    def __init__(self, observer: RunObserver) -> None:
        self._observer = observer
        self._cpu_seconds = 0.0

    def read(self) -> float:
        """CPU seconds since it was last asked."""
        seconds, self._cpu_seconds = self._cpu_seconds, 0.0
        return seconds

    def begin(self, step: BalancedStep, *, iteration: int) -> None:
        """As the observer's."""
        with self._metering():
            self._observer.begin(step, iteration=iteration)

    def forward(self, slot: int) -> contextlib.AbstractContextManager[None]:
        """As the observer's."""
        return self._metered(lambda: self._observer.forward(slot))

    def backward(self) -> contextlib.AbstractContextManager[None]:
        """As the observer's."""
        return self._metered(self._observer.backward)

    @contextlib.contextmanager
    def _metered(self, timed: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
        with self._metering():
            inner = timed()
            inner.__enter__()
        yield
        with self._metering():
            inner.__exit__(None, None, None)

    def end(self) -> None:
        """As the observer's."""
        with self._metering():
            self._observer.end()

    def logged(self, iteration: int) -> None:
        """As the observer's."""
        with self._metering():
            self._observer.logged(iteration)

    @contextlib.contextmanager
    def _metering(self) -> Iterator[None]:
        began = time.thread_time()
        yield
        self._cpu_seconds += time.thread_time() - began


if __name__ == "__main__":
    main()
