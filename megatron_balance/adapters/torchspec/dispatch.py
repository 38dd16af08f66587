"""Approach B: when samples leave. The controller's `try_dispatch_batch` with a window before it.

    1. fewer samples than a dispatch takes: TorchSpec's own function says so
    2. the pool is held back until it holds `window` dispatches' worth, unless no more would come:
       the prompts are all handed out (end of data), inference is paused by `max_sample_pool_size`,
       or nothing has come for `MAX_IDLE_CALLS` calls (whatever else holds inference up)
    3. what leaves is brought to the front of the pool (`window.py`), and TorchSpec's own function takes it from
       there: bytes, queues and logs are its own

Invariants: a dispatch that the stock controller could make is held back for a bounded number of calls, so nothing
deadlocks where the pool may not grow to the window; at the end of data all whole dispatches leave.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron_balance.adapters.torchspec.sample_lengths import result_length
from megatron_balance.adapters.torchspec.settings import Settings
from megatron_balance.adapters.torchspec.window import DispatchWindow
from megatron_balance.hooking.patches import Function

MAX_IDLE_CALLS = 500
"""Calls of `try_dispatch_batch` without a new sample after which the pool is taken as it is. TorchSpec's loop calls
every 10 ms, and takes the data for exhausted after as many."""


class _HeldDispatch:
    """The window of one controller, and how long it has been held back."""

    def __init__(self, controller: Any, *, settings: Settings) -> None:
        self.window = DispatchWindow(
            settings.window,
            dispatch_batch_size=controller.dispatch_batch_size,
            dp_size=controller.dp_size,
            cost=settings.cost,
        )
        self.num_held_calls = 0
        self._idle_calls = 0
        self._last_pool_size = 0

    def holds_back(self, controller: Any) -> bool:
        """Whether to wait for more samples."""
        pool_size = len(controller.sample_pool)
        self._idle_calls = self._idle_calls + 1 if pool_size == self._last_pool_size else 0
        self._last_pool_size = pool_size
        most = getattr(controller.args, "max_sample_pool_size", 0) or 0
        held = (
            controller.dispatch_batch_size <= pool_size < self.window.capacity
            and controller.get_prompt_buffer_size() > 0
            # What the inference manager compares: samples for evaluation count as well.
            and not 0 < most <= controller.get_pool_size()
            and self._idle_calls < MAX_IDLE_CALLS
        )
        self.num_held_calls += held
        return held

    def note_left(self) -> None:
        self.window.leave()
        # A dispatch is no arrival: the wait for the next sample starts again.
        self._idle_calls, self._last_pool_size = 0, -1


def _held_dispatch(controller: Any, settings: Settings) -> _HeldDispatch:
    """The window of this controller, made when it is first asked for: the class was hooked before it existed."""
    if not hasattr(controller, "_balance_dispatch"):
        controller._balance_dispatch = _HeldDispatch(controller, settings=settings)
    return controller._balance_dispatch


def with_window(try_dispatch_batch: Function, *, settings: Settings) -> Function:
    """`try_dispatch_batch` that chooses among several dispatches' worth of samples."""

    @functools.wraps(try_dispatch_batch)
    def wrapper(controller: Any) -> bool:
        held = _held_dispatch(controller, settings)
        # A failed inference is told at once, by the controller's own words.
        if controller._inference_error is None:
            if held.holds_back(controller):
                return False
            with controller._pool_lock:
                pool = controller.sample_pool
                if len(pool) >= controller.dispatch_batch_size:
                    held.window.arrange(pool, lengths=[result_length(result) for result in pool])
        # What is pushed from here on goes to the end of the pool, behind those that leave.
        dispatched = try_dispatch_batch(controller)
        if dispatched:
            held.note_left()
        return dispatched

    return wrapper


def with_delays_reported(get_status: Function, *, settings: Settings) -> Function:
    """`get_status`, and `get_full_status` through it, that also say what choosing costs."""

    @functools.wraps(get_status)
    def wrapper(controller: Any) -> dict[str, Any]:
        held = _held_dispatch(controller, settings)
        delays = held.window.metrics()
        return {
            **get_status(controller),
            "balance_max_delay_dispatches": delays.max_delay,
            "balance_mean_delay_dispatches": delays.mean_delay,
            "balance_delay_limit_dispatches": held.window.max_delay,
            "balance_held_calls": held.num_held_calls,
        }

    return wrapper
