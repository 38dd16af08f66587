"""The hooks in Megatron, in a checked table.

    from megatron_balance.mcore import install
    patches = install()      # before Megatron parses arguments
    patches.undo()

Without a balance flag the hooks hand on to Megatron's own functions: the run is stock.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from megatron_balance.errors import BalanceError
from megatron_balance.hooking.patches import Function, Hook, Patches
from megatron_balance.hooking.patches import install as install_hooks
from megatron_balance.mcore.checkpoint import forget_state, save_state, state_folder
from megatron_balance.mcore.forward_backward import BalancedForwardBackward, balanced_forward_backward
from megatron_balance.mcore.packing_scheduler import Registration, register
from megatron_balance.mcore.setup.flags import add_balance_args
from megatron_balance.mcore.step.router_padding import (
    counts_of_real_tokens,
    embeddings_with_mask_in_place,
    expert_bias_of_real_tokens,
)

SUPPORTED_VERSIONS = ("0.17", "0.18", "0.19")
"""Megatron Core releases on which the tests run."""

ANY_VERSION = "MEGATRON_BALANCE_ANY_VERSION"
"""Set to 1 in the environment of every rank, it lets another release through; hooks are checked as ever."""


def _with_balance_arguments(add_megatron_arguments: Function) -> Function:
    @functools.wraps(add_megatron_arguments)
    def wrapper(parser: Any) -> Any:
        return add_balance_args(add_megatron_arguments(parser))

    return wrapper


def _with_balanced_schedule(get_forward_backward_func: Function) -> Function:
    @functools.wraps(get_forward_backward_func)
    def wrapper(*positional: Any, **keywords: Any) -> Function:
        schedule = get_forward_backward_func(*positional, **keywords)
        balanced = _of_this_run()
        return schedule if balanced is None else functools.partial(balanced, schedule)

    return wrapper


def _with_state_saved(save_checkpoint: Function) -> Function:
    @functools.wraps(save_checkpoint)
    def wrapper(iteration: int, *positional: Any, **keywords: Any) -> Any:
        from megatron.training import get_args

        if not keywords.get("non_persistent_ckpt"):
            # Before Megatron says that the checkpoint is complete. A run that resumed at its end has had no step yet.
            args: Any = get_args()
            balanced, checkpoints = _of_this_run(), args.save
            if checkpoints and balanced is None:
                forget_state(state_folder(checkpoints, iteration))
            elif checkpoints and balanced is not None:
                save_state(balanced.prefetcher, folder=state_folder(checkpoints, iteration))
            if balanced is not None and balanced.observer is not None:
                balanced.observer.flush()  # a run that resumes from here finds its record whole
        return save_checkpoint(iteration, *positional, **keywords)

    return wrapper


def _with_backward_timed(backward_step: Function) -> Function:
    @functools.wraps(backward_step)
    def wrapper(*positional: Any, **keywords: Any) -> Any:
        balanced = current()
        if balanced is None or balanced.observer is None:
            return backward_step(*positional, **keywords)
        with balanced.observer.backward():
            return backward_step(*positional, **keywords)

    return wrapper


def _with_documents_split(split_whole_row: Function) -> Function:
    @functools.wraps(split_whole_row)
    def wrapper(batch: Any, cp_group: Any) -> Any:
        from megatron.core import utils

        return utils._get_batch_on_this_cp_rank_per_document_balancing(batch, cp_group)

    return wrapper


def _with_planned_shapes(communicate_shapes: Function) -> Function:
    @functools.wraps(communicate_shapes)
    def wrapper(
        communicator: Any, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> Any:
        balanced = current()
        if balanced is None or balanced.pipeline_shapes is None:
            return communicate_shapes(communicator, tensor_send_next, tensor_send_prev, recv_prev, recv_next)
        return balanced.pipeline_shapes.exchange(
            tensor_send_next, tensor_send_prev, receives_activation=recv_prev, receives_gradient=recv_next
        )

    return wrapper


def _with_packs_kept(merge_rows: Function) -> Function:
    @functools.wraps(merge_rows)
    def wrapper(cu_seqlens: Any, seq_length: Any) -> Any:
        return cu_seqlens.squeeze(0)

    return wrapper


def _with_figures_logged(training_log: Function) -> Function:
    @functools.wraps(training_log)
    def wrapper(*positional: Any, **keywords: Any) -> Any:
        result = training_log(*positional, **keywords)
        balanced = current()
        if balanced is not None:
            balanced.logged()
        return result

    return wrapper


def _while_balancing(wrap: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """A wrapper that is used in balanced steps alone."""

    def of(function: Function) -> Function:
        wrapped = wrap(function)

        @functools.wraps(function)
        def wrapper(*positional: Any, **keywords: Any) -> Any:
            balanced = current()
            in_step = balanced is not None and balanced.in_step
            return (wrapped if in_step else function)(*positional, **keywords)

        return wrapper

    return of


HOOKS = (
    Hook(
        target="megatron.training.arguments:add_megatron_arguments",
        bound_in=("megatron.training.arguments",),
        parameters=("parser",),
        wrap=_with_balance_arguments,
        why="the flags reach every script; parse_args looks the function up when it is called",
        until="Megatron reads extra arguments from an entry point",
    ),
    Hook(
        target="megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
        bound_in=("megatron.training.training",),
        parameters=("pp_size", "vp_size"),
        wrap=_with_balanced_schedule,
        why="train() asks it for the schedule of every step and passes the data iterator to that",
        until="core/datasets/data_schedule.py's scheduler_map (0.20) takes schedulers from outside",
    ),
    Hook(
        target="megatron.training.checkpointing:save_checkpoint",
        bound_in=("megatron.training.training",),
        parameters=("iteration", "non_persistent_ckpt"),
        wrap=_with_state_saved,
        why="keeps samples that wait under --balance-lookahead, what --balance-calibrate-online learned, the record",
        until="Megatron's data loaders save a state of their own",
    ),
    Hook(
        target="megatron.core.pipeline_parallel.schedules:backward_step",
        bound_in=("megatron.core.pipeline_parallel.schedules",),
        parameters=(),
        wrap=_with_backward_timed,
        why="measures backward passes while a run balances; every schedule looks the function up; else nothing",
        until="schedules report when micro-batches begin and end",
    ),
    Hook(
        target="megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate_shapes",
        bound_in=("megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator",),
        parameters=("tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next"),
        wrap=_with_planned_shapes,
        why="stages take the shapes of a balanced step from its plan in place of messages and waits for the device",
        until="the schedules take a shape for each micro-batch",
    ),
    Hook(
        target="megatron.training.training:training_log",
        bound_in=("megatron.training.training",),
        parameters=(),
        wrap=_with_figures_logged,
        why="tells the figures of balancing after Megatron's own, when the device has just been waited for",
        until="Megatron has callbacks around a step",
    ),
    Hook(
        target="megatron.core.utils:_get_batch_on_this_cp_rank_per_sequence_balancing",
        bound_in=("megatron.core.utils",),
        parameters=("batch", "cp_group"),
        wrap=_while_balancing(_with_documents_split),
        why="scripts ask for it under --dataloader-inter-document-masking; our packs hold documents that split alone",
        until="Megatron splits packed sequences by document under that flag, as attention and rotary angles expect",
        first=(0, 19),
    ),
    Hook(
        target="megatron.core.transformer.moe.router:TopKRouter._apply_expert_bias",
        bound_in=("megatron.core.transformer.moe.router:TopKRouter",),
        parameters=("routing_map", "padding_mask"),
        wrap=_while_balancing(expert_bias_of_real_tokens),
        why="fails on a padding mask: it combines [num_tokens, num_experts] with [num_tokens]",
        until="0.20, which gives the mask a second dimension",
    ),
    Hook(
        target="megatron.core.transformer.moe.moe_utils:get_tokens_per_expert_and_token_count",
        bound_in=("megatron.core.transformer.moe.router",),
        parameters=("reduce_group", "with_padding_mask"),
        wrap=_while_balancing(counts_of_real_tokens),
        why="no tokens make an auxiliary loss NaN; parts of ranks with unequal padding weigh unequally",
        until="Megatron scales auxiliary losses by the tokens of the group, at least one",
    ),
    Hook(
        target="megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer._get_embeddings",
        bound_in=("megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer",),
        parameters=("padding_mask",),
        wrap=_while_balancing(embeddings_with_mask_in_place),
        why="it shifts the padding mask with the tokens, so that the routers of these layers count padding",
        until="Megatron hands the mask on as it is",
        first=(0, 18),
    ),
    Hook(
        target="megatron.core.utils:_merge_cu_seqlens_across_micro_batch",
        bound_in=("megatron.core.utils",),
        parameters=("cu_seqlens", "seq_length"),
        wrap=_while_balancing(_with_packs_kept),
        why="waits for the device to find padding in cu_seqlens, and again in cu_seqlens_padded; packs have none there",
        until="Megatron cuts padding of cu_seqlens off before they are on the device",
        first=(0, 19),
    ),
)


def hooks_of(version: str) -> tuple[Hook, ...]:
    """The hooks of a Megatron Core, `version` as it names itself."""
    major, minor = (int(number) for number in version.split(".")[:2])
    return tuple(hook for hook in HOOKS if hook.is_in((major, minor)))


_patches: Patches | None = None
_registration: Registration | None = None
_balanced: tuple[Any, BalancedForwardBackward | None] | None = None  # of these arguments


def install() -> InstalledHooks:
    """Hook Megatron in this process; where it has packing schedulers, add ours. Installing twice installs once.

    Raises:
        BalanceError: Megatron is missing, of another version, or a target has moved; nothing is changed then.
    """
    global _patches, _registration
    if _patches is None:
        version = supported_version()
        patches = install_hooks(hooks_of(version), version=f"megatron-core {version}")
        _registration = register()
        _patches = patches
    return InstalledHooks()


class InstalledHooks:
    """The hooks of this process."""

    def undo(self) -> None:
        """Take the hooks out and forget the run they served."""
        global _patches, _registration, _balanced
        if _registration is not None:
            _registration.undo()
            _registration = None
        if _patches is not None:
            _patches.undo()
        _patches = _balanced = None


def supported_version() -> str:
    """The version of Megatron Core in this environment.

    Raises:
        BalanceError: there is none, or it is not one of SUPPORTED_VERSIONS and nobody asked for another.
    """
    version = _megatron_version()
    supported = version.startswith(tuple(f"{release}." for release in SUPPORTED_VERSIONS))
    if not supported and os.environ.get(ANY_VERSION) != "1":
        raise BalanceError(
            f"megatron-core is {version}; megatron_balance is tested on {', '.join(SUPPORTED_VERSIONS)}: install "
            f"megatron-core[training]=={SUPPORTED_VERSIONS[-1]}.*, train without --balance-*, or set {ANY_VERSION}=1 "
            "to try this one."
        )
    return version


def current() -> BalancedForwardBackward | None:
    """What balances the run of this process, once its first step has begun; None in a stock run."""
    return None if _balanced is None else _balanced[1]


def _of_this_run() -> BalancedForwardBackward | None:
    """Built once for a run's arguments: evaluation asks for a schedule again and again."""
    from megatron.training import get_args

    global _balanced
    args = get_args()
    if _balanced is None or _balanced[0] is not args:
        _balanced = args, balanced_forward_backward(args)
    return _balanced[1]


def _megatron_version() -> str:
    try:
        from megatron.core.package_info import __version__
    except ModuleNotFoundError as error:
        raise BalanceError(
            "megatron-core is not installed: pip install 'megatron-balance[megatron]' or set PYTHONPATH to it."
        ) from error
    return __version__
