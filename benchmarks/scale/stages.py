"""Times the stages of preparing a step, by the clock and in CPU seconds of the thread, without changing the planner."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron_balance.mcore import prepare
from megatron_balance.mcore.prepare import StepBuilder
from megatron_balance.runtime import exchange

STAGES = {
    "gather": (prepare, "gather_lengths"),
    "plan": (StepBuilder, "_plan"),
    "write": (exchange, "_write"),
    "exchange": (exchange, "exchange_parts"),
    "pack": (prepare, "pack"),
    "compare": (prepare, "check_same_schedule"),
}
"""Stage → where its function is looked up."""

_WHOLE = {"all": (StepBuilder, "build")}
"""The stage that holds the others."""


class StageTimes:
    """The steps that were prepared, one after another."""

    def __init__(self) -> None:
        self.steps: list[dict[str, list[float]]] = []
        self.sent_nbytes: list[int] = []
        self.num_peers: list[int] = []

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Time all steps that are prepared meanwhile."""
        places = [*STAGES.items(), *_WHOLE.items()]
        stock = [(owner, name, getattr(owner, name)) for _, (owner, name) in places]
        for (stage, _), (owner, name, function) in zip(places, stock, strict=True):
            setattr(owner, name, self._timed(stage, function))
        try:
            yield
        finally:
            for owner, name, function in stock:
                setattr(owner, name, function)

    def _timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*positional: Any, **keywords: Any) -> Any:
            if stage == "all":
                self.steps.append(defaultdict(lambda: [0.0, 0.0]))
                self.sent_nbytes.append(0)
                self.num_peers.append(0)
            if stage == "exchange":
                self.sent_nbytes[-1] += sum(keywords["send_sizes"].values())
                self.num_peers[-1] += len(keywords["send_sizes"])
            started = time.perf_counter(), time.thread_time()
            result = function(*positional, **keywords)
            ended = time.perf_counter(), time.thread_time()
            spent = self.steps[-1][stage]
            for clock in range(2):
                spent[clock] += ended[clock] - started[clock]
            return result

        return timed
