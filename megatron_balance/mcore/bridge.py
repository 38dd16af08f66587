"""Balanced training and evaluation in Megatron-Bridge's loop.

Bridge asks for Megatron's schedule in modules that bind the function by value, and passes it to `train_step` with the
model and the configuration: there it is replaced. Nothing of Bridge's configuration, data set or forward step is
changed; a step's batches have the keys that its forward step reads (`samples.packing.with_attention_keys`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.hooking import Function, Hook, Installation
from megatron_balance.mcore.hooks import supported_version
from megatron_balance.mcore.loop import run_of_model
from megatron_balance.mcore.run import end_run, run_of, while_balancing
from megatron_balance.mcore.step import BalancedForwardBackward as Run
from megatron_balance.model.shape import ModelShape
from megatron_balance.samples.packing import with_attention_keys


class BridgeSettings(NamedTuple):
    """Arguments of `install_bridge`."""

    max_tokens_per_gpu: int
    cost: CostModel | ModelShape | None
    flags: tuple[str, ...]


def install_bridge(
    *, max_tokens_per_gpu: int, cost: CostModel | ModelShape | None = None, flags: Sequence[str] = ()
) -> Installation[BridgeSettings]:
    """Have Megatron-Bridge's `pretrain` and `finetune` balance training and evaluation.

    Every rank calls it before them. The configuration needs `model.calculate_per_token_loss`. With the data loader
    `batch`, which hands out a global batch at a time, nothing is prepared while a step runs.

    Args:
        max_tokens_per_gpu: the largest number of tokens of a micro-batch on one GPU.
        cost: of a sample, or the model whose FLOPs count; by default those of the model that Bridge builds.
        flags: further balance flags, such as `["--balance-record", "run"]`.

    Returns:
        The installation; `undo()` removes the hooks and forgets the run.

    Raises:
        BalanceError: Megatron-Bridge is missing, of another version or has changed, or is hooked with other settings;
            nothing is changed then.
    """
    settings = BridgeSettings(max_tokens_per_gpu, cost, tuple(flags))
    return bridge_installation.install(settings, _checked_hooks, end=end_run)


def _checked_hooks() -> tuple[Hook, ...]:
    supported_version()
    return BRIDGE_HOOKS


def _of_run(replacement: Function, *, state: str) -> Callable[[Function], Function]:
    """A wrapper that takes effect in a balanced run of the state that is passed by this name."""

    def wrap(function: Function) -> Function:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def wrapper(*positional: Any, **keywords: Any) -> Any:
            call = signature.bind(*positional, **keywords)
            run = _run_of(call.arguments[state], model=call.arguments["model"])
            return function(*positional, **keywords) if run is None else replacement(run, function, call)

        return wrapper

    return wrap


def _train_step(run: Run, train_step: Function, call: inspect.BoundArguments) -> Any:
    _check_loader(call.arguments["data_iterator"])
    call.arguments["forward_backward_func"] = _balanced(run, call.arguments["forward_backward_func"])
    return train_step(*call.args, **call.kwargs)


def _evaluate(run: Run, evaluate: Function, call: inspect.BoundArguments) -> Any:
    """Losses are sums over tokens, which no packing changes."""
    with run.evaluating(call.arguments["state"].cfg.validation.eval_iters):
        return evaluate(*call.args, **call.kwargs)


def _evaluation_schedule(run: Run, get_forward_backward_func: Function, *positional: Any, **keywords: Any) -> Function:
    schedule = get_forward_backward_func(*positional, **keywords)
    return _balanced(run, schedule) if run.evaluates else schedule


BRIDGE_HOOKS = (
    Hook(
        target="megatron.bridge.training.train:train_step",
        parameters=("data_iterator", "model", "global_state", "forward_backward_func"),
        wrap=_of_run(_train_step, state="global_state"),
        reason="train() binds get_forward_backward_func by value, and passes it here with the model and the state",
        # Until Bridge takes a schedule, or a data scheduler, from its configuration.
    ),
    Hook(
        target="megatron.bridge.training.eval:evaluate",
        parameters=("state", "model"),
        wrap=_of_run(_evaluate, state="state"),
        reason="only its forward-only steps are balanced, and it has the model and the run's state",
    ),
    Hook(
        target="megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
        bound_in=("megatron.bridge.training.eval",),
        parameters=("pp_size", "vp_size"),
        wrap=while_balancing(_evaluation_schedule),
        reason="evaluate() asks for the schedule by the name that its module bound by value",
    ),
)
"""The hooks in Megatron-Bridge, beside those in megatron.core."""

bridge_installation: Installation[BridgeSettings] = Installation(
    "megatron-bridge", versions=("0.6", "0.7"), remedy="pip install megatron-bridge==0.6.2"
)


def _run_of(state: Any, *, model: Any) -> Run | None:
    """The balanced run of Bridge's state, built on the first call; every rank of the world calls it."""
    return run_of(state, lambda: _build(state, model=model))


def _build(state: Any, *, model: Any) -> Run | None:
    config, settings = state.cfg, bridge_installation.settings
    assert settings is not None, "the hooks are installed"
    if config.dist.use_decentralized_pg:
        raise BalanceError(
            "dist.use_decentralized_pg is set: process groups are then not those of megatron.core's parallel state, "
            "from which the layout is read; unset it, or train without install_bridge()."
        )
    # From a loader of whole batches each step has an iterator of its own, which ends with it.
    no_overlap = ["--no-balance-overlap"] if config.dataset.dataloader_type == "batch" else []
    return run_of_model(
        model,
        flags=[*no_overlap, "--max-tokens-per-gpu", str(settings.max_tokens_per_gpu), *settings.flags],
        cost=settings.cost,
        eval_iters=config.validation.eval_iters or 0,
        lora_rank=getattr(config.peft, "dim", 0),
        num_steps_done=lambda: state.train_state.step,
        train_iters=config.train.train_iters,
        log_interval=config.logger.log_interval,
        distributed_timeout_minutes=config.dist.distributed_timeout_minutes,
    )


def _check_loader(data_iterator: Any) -> None:
    iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    if any(hasattr(getattr(iterator, "iterable", None), "save_state") for iterator in iterators):
        raise BalanceError(
            "the data loader saves its position with checkpoints (Energon): samples that were pulled ahead would be "
            "lost with it; train on another data set, or without install_bridge()."
        )


def _balanced(run: Run, schedule: Callable[..., Any]) -> Callable[..., Any]:
    """The schedule, over balanced micro-batches with the keys that Bridge's forward step reads."""
    with_keys = functools.partial(map, with_attention_keys)

    @functools.wraps(schedule)
    def on_packs(**arguments: Any) -> Any:
        iterators = arguments["data_iterator"]
        packs = [*map(with_keys, iterators)] if isinstance(iterators, list) else with_keys(iterators)
        return schedule(**arguments | {"data_iterator": packs})

    return functools.partial(run, on_packs)
