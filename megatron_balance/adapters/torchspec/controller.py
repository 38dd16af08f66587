"""Finds the class of TorchSpec's controller, and wraps its methods that assign, dispatch and order samples.

`@ray.remote` leaves an `ActorClass` object under the class's name. It keeps a subclass of the plain class, in which it
wraps every method to trace it, and pickles both by value into the actor's process when the first actor starts. Patches
made before that reach the actor, but only those on the subclass: its methods hide those of the plain class.
`AsyncTrainingController` of this module is that subclass, so that a hook can name it.

`try_dispatch_batch`, with a window before it (approach B):

    1. with fewer samples than a dispatch takes, TorchSpec's own function returns False
    2. the pool is held back until it holds `window` dispatches' worth, unless no more would come:
       the prompts are all handed out (end of data), inference is paused by `max_sample_pool_size`,
       or nothing has come for `MAX_IDLE_CALLS` calls, whatever else blocks inference
    3. the samples that leave are brought to the front of the pool (`window.py`), and TorchSpec's own function takes
       them from there: bytes, queues and logs are its own

Invariants: a dispatch that the stock controller could make is held back for a bounded number of calls, so nothing
deadlocks where the pool may not grow to the window; at the end of data all whole dispatches leave.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

from megatron_balance.adapters.kit import Function
from megatron_balance.adapters.torchspec.plan import assign_ranks, bucketed_order, data_lengths, result_length
from megatron_balance.adapters.torchspec.window import DispatchWindow

if TYPE_CHECKING:
    from megatron_balance.adapters.torchspec import Settings

CONTROLLER = "torchspec.controller.training_controller"

MAX_IDLE_CALLS = 500
"""Calls of `try_dispatch_batch` without a new sample after which the pool is taken as it is. TorchSpec's loop calls
every 10 ms, and considers the data exhausted after the same number."""


def __getattr__(name: str) -> Any:
    """`AsyncTrainingController`, looked up on access: importing this module does not import TorchSpec."""
    if name != "AsyncTrainingController":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    controller = getattr(importlib.import_module(CONTROLLER), name, None)
    ray_metadata = getattr(controller, "__ray_metadata__", None)
    if ray_metadata is None:
        return controller  # Ray's decorator was switched off.
    # Where Ray does not trace, the subclass has no methods of its own.
    modified = ray_metadata.modified_class
    return next((owner for owner in modified.__mro__ if "_partition_results" in vars(owner)), modified)


def with_ranks_by_length(partition_results: Function, *, settings: Settings) -> Function:
    """`_partition_results` by length, where every rank gets the same number of samples, two or more.

    With one sample a rank (micro_batch_size 1, or evaluation) there is nothing to choose, and TorchSpec's own
    function is called.
    """

    @functools.wraps(partition_results)
    def wrapper(controller: Any, results: list[Any]) -> list[list[Any]]:
        count, left = divmod(len(results), controller.dp_size)
        if count <= 1 or left or controller.dp_size == 1:
            return partition_results(controller, results)
        lengths = [result_length(result) for result in results]
        ranks = assign_ranks(lengths, dp_size=controller.dp_size, cost=settings.cost, turn=controller.batch_id)
        return [[results[position] for position in positions] for positions in ranks]

    return wrapper


def with_presorted_data(prepare_dataset: Function, *, settings: Settings) -> Function:
    """`_prepare_dataset` with its samples sorted into buckets of similar lengths."""

    @functools.wraps(prepare_dataset)
    def wrapper(controller: Any, skip: int = 0) -> list[Any]:
        # The whole epoch: skipping applies to the order made here.
        samples = prepare_dataset(controller, skip=0)
        order = bucketed_order(
            data_lengths(samples),
            batch_size=controller.dispatch_batch_size,
            bucket_batches=settings.bucket_batches,
            seed=controller._dataset_seed,
            epoch=controller._dataset_epoch,
        )
        return [samples[index] for index in order[max(skip, 0) :].tolist()]

    return wrapper


class _HeldDispatch:
    """One controller's window, and the number of calls that were held back."""

    def __init__(self, controller: Any, *, settings: Settings) -> None:
        self.window = DispatchWindow(settings.window, dispatch_batch_size=controller.dispatch_batch_size)
        self.num_held_calls = 0
        self._idle_calls = 0
        self._last_pool_size = 0

    def holds_back(self, controller: Any) -> bool:
        """True if more samples must arrive first."""
        pool_size = len(controller.sample_pool)
        self._idle_calls = self._idle_calls + 1 if pool_size == self._last_pool_size else 0
        self._last_pool_size = pool_size
        most = getattr(controller.args, "max_sample_pool_size", 0) or 0
        held = (
            controller.dispatch_batch_size <= pool_size < self.window.capacity
            and controller.get_prompt_buffer_size() > 0
            # The inference manager compares this size: samples for evaluation count as well.
            and not 0 < most <= controller.get_pool_size()
            and self._idle_calls < MAX_IDLE_CALLS
        )
        self.num_held_calls += held
        return held

    def note_left(self) -> None:
        self.window.leave()
        # A dispatch does not count as an arrival: the wait for the next sample starts again.
        self._idle_calls, self._last_pool_size = 0, -1


def _held_dispatch(controller: Any, settings: Settings) -> _HeldDispatch:
    """The controller's window, made on first use: the class is hooked before a controller exists."""
    if not hasattr(controller, "_balance_dispatch"):
        controller._balance_dispatch = _HeldDispatch(controller, settings=settings)
    return controller._balance_dispatch


def with_window(try_dispatch_batch: Function, *, settings: Settings) -> Function:
    """`try_dispatch_batch` that chooses among several dispatches' worth of samples."""

    @functools.wraps(try_dispatch_batch)
    def wrapper(controller: Any) -> bool:
        held = _held_dispatch(controller, settings)
        # The controller raises a failed inference at once.
        if controller._inference_error is None:
            if held.holds_back(controller):
                return False
            with controller._pool_lock:
                pool = controller.sample_pool
                if len(pool) >= controller.dispatch_batch_size:
                    held.window.arrange(pool, lengths=[result_length(result) for result in pool])
        # Samples pushed from here on go to the end of the pool, behind those that leave.
        dispatched = try_dispatch_batch(controller)
        if dispatched:
            held.note_left()
        return dispatched

    return wrapper


def with_delays_reported(get_status: Function, *, settings: Settings) -> Function:
    """`get_status`, and `get_full_status` through it, with the delays that choosing causes."""

    @functools.wraps(get_status)
    def wrapper(controller: Any) -> dict[str, Any]:
        held = _held_dispatch(controller, settings)
        return {
            **get_status(controller),
            "balance_max_delay_dispatches": held.window.max_delay_seen,
            "balance_mean_delay_dispatches": held.window.mean_delay,
            "balance_delay_limit_dispatches": held.window.max_delay,
            "balance_held_calls": held.num_held_calls,
        }

    return wrapper
