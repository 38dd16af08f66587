"""Balanced steps for a training loop of one's own, on `megatron.core` alone.

    forward_backward = balanced_schedule(get_forward_backward_func(), model=model, max_tokens_per_gpu=8192)

The loop calls it as it calls Megatron's schedule, with its own data iterator. Nothing of `megatron.training` is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from megatron_balance.cost.model import CostModel
from megatron_balance.mcore.build_run import build_run
from megatron_balance.mcore.current_run import serving
from megatron_balance.mcore.forward_backward import BalancedForwardBackward
from megatron_balance.mcore.hooks import core_installation, install_core
from megatron_balance.mcore.setup.loop_settings import settings_of_loop
from megatron_balance.mcore.setup.state import LoopState
from megatron_balance.mcore.step.balanced_step import BalancedStep
from megatron_balance.model.shape import ModelShape
from megatron_balance.runtime.process import close_all

Schedule = Callable[..., Any]

TIMEOUT = timedelta(minutes=10)


def balanced_schedule(
    forward_backward_func: Schedule,
    *,
    model: Any,
    max_tokens_per_gpu: int,
    cost: CostModel | ModelShape | None = None,
    flags: Sequence[str] = (),
    num_steps: int | None = None,
    log_interval: int | None = None,
    timeout: timedelta = TIMEOUT,
) -> Schedule:
    """A schedule that balances every training step, to be called in place of Megatron's.

    Every rank of the world calls it, once `parallel_state` is initialized and the model is built. Each call of the
    result pulls `num_microbatches` items from `data_iterator`, moves their samples between data-parallel ranks, and
    runs Megatron's schedule over packed micro-batches: dicts with the keys of the items, per-token ones
    `[1, num_tokens]`, `cu_seqlens` and `max_seqlen` (`packed_seq_params` reads them). The ranks of a model replica that
    pass an iterator pass the same items. The configuration needs `calculate_per_token_loss`: the loss function returns
    the sum of losses and the number of tokens, and `finalize_model_grads_func` divides by it.

    Args:
        forward_backward_func: of `get_forward_backward_func()`.
        model: Megatron's module, wrapped for data parallelism or not, or a list of chunks under a virtual pipeline.
        max_tokens_per_gpu: the largest number of tokens of a micro-batch on one GPU.
        cost: of a sample, or the model whose FLOPs count; by default those of `model`'s configuration.
        flags: further balance flags, such as `["--balance-record", "run"]`.
        num_steps: of the loop; without it, the step after the last one is prepared in vain.
        log_interval: steps between log lines with the figures of balancing; None for no lines.
        timeout: of this package's collectives.

    Returns:
        A `BalancedSchedule`; `forward_backward_func` itself where the run must stay stock, with a warning.

    Raises:
        BalanceError: on every rank: a setting that balancing does not go with, or ranks that differ.
    """
    install_core()
    options, read = settings_of_loop(
        flags,
        model=model,
        max_tokens_per_gpu=max_tokens_per_gpu,
        cost=cost,
        num_steps=num_steps,
        log_interval=log_interval,
        timeout=timeout,
    )
    state = LoopState(num_steps=num_steps)
    run = build_run(options, read=read, timeout=timeout, state=state)
    if run is None:
        return forward_backward_func
    return BalancedSchedule(forward_backward_func, run=run, state=state, logs=bool(log_interval))


class BalancedSchedule:
    """Megatron's schedule with balanced micro-batches; `balanced_schedule` makes it.

    Args:
        schedule: Megatron's.
        run: balances.
        state: where its steps are counted.
        logs: print the figures of balancing.
    """

    def __init__(self, schedule: Schedule, *, run: BalancedForwardBackward, state: LoopState, logs: bool) -> None:
        self._schedule = schedule
        self._run = run
        self._state, self._logs = state, logs

    @property
    def last_step(self) -> BalancedStep | None:
        """The data of the newest step on this rank."""
        return self._run.last_step

    def undo(self) -> None:
        """End the run's threads, processes and groups, and unhook `megatron.core`, once training is over.

        Every rank calls it after the same step. Hooks that `install` put in place stay.
        """
        core_installation.undo()
        close_all()

    def __call__(self, **arguments: Any) -> Any:
        """Run one step, or an evaluation (`forward_only`). Arguments and result are those of Megatron's schedule."""
        with serving(self._run):
            result = self._run(self._schedule, **arguments)
            if not arguments.get("forward_only"):
                if self._logs:
                    self._run.logged()
                self._state.num_done += 1
        return result
