"""Replacements of Megatron's functions while a run balances; `hooks.py` lists them with reasons.

Each takes the run, Megatron's function, and the arguments of that. Without a balance flag, and outside a balanced
step where it says so, `while_balancing` calls Megatron's function alone.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from megatron_balance.errors import BalanceError
from megatron_balance.hooking import Function
from megatron_balance.mcore.forward_backward import BalancedForwardBackward as Run
from megatron_balance.mcore.run import current
from megatron_balance.mcore.setup.flags import add_balance_args


def while_balancing(
    replacement: Function, *, in_step: bool = False, run: Callable[[], Run | None] = current
) -> Callable[[Function], Function]:
    """A wrapper that takes effect in a balanced run, or in its balanced steps alone; `run` may build it."""

    def wrap(function: Function) -> Function:
        @functools.wraps(function)
        def wrapper(*positional: Any, **keywords: Any) -> Any:
            balanced = run()
            if balanced is None or (in_step and not balanced.in_step):
                return function(*positional, **keywords)
            return replacement(balanced, function, *positional, **keywords)

        return wrapper

    return wrap


def with_balance_arguments(add_megatron_arguments: Function) -> Function:
    """Add the balance flags to Megatron's parser."""

    @functools.wraps(add_megatron_arguments)
    def wrapper(parser: Any) -> Any:
        return add_balance_args(add_megatron_arguments(parser))

    return wrapper


def schedule(run: Run, get_forward_backward_func: Function, *positional: Any, **keywords: Any) -> Function:
    """A schedule that balances the step."""
    return functools.partial(run, get_forward_backward_func(*positional, **keywords))


def evaluate(run: Run, evaluate: Function, *positional: Any, **keywords: Any) -> Any:
    """Balance the forward-only steps of an evaluation, where the run does."""
    from megatron.training import get_args

    if run.evaluation is None:
        return evaluate(*positional, **keywords)
    args: Any = get_args()
    given = inspect.signature(evaluate).bind(*positional, **keywords).arguments.get("eval_iters")
    with run.evaluation.running(args.eval_iters if given is None else given):
        return evaluate(*positional, **keywords)


def backward_step(run: Run, backward_step: Function, *positional: Any, **keywords: Any) -> Any:
    """Time a backward pass."""
    with contextlib.nullcontext() if run.observer is None else run.observer.timed():
        return backward_step(*positional, **keywords)


def split_by_document(run: Run, split_whole_row: Function, batch: Any, cp_group: Any) -> Any:
    """Split packed sequences by document, not the whole row, over context-parallel ranks."""
    from megatron.core import utils

    return utils._get_batch_on_this_cp_rank_per_document_balancing(batch, cp_group)


def communicate_shapes(
    run: Run,
    communicate: Function,
    communicator: Any,
    tensor_send_next: Any,
    tensor_send_prev: Any,
    recv_prev: bool,
    recv_next: bool,
) -> Any:
    """Take the shapes of a step's messages from its plan."""
    if run.pipeline_shapes is None:
        return communicate(communicator, tensor_send_next, tensor_send_prev, recv_prev, recv_next)
    return run.pipeline_shapes.exchange(
        tensor_send_next, tensor_send_prev, receives_activation=recv_prev, receives_gradient=recv_next
    )


def attention_forward(run: Run, forward: Function, attention: Any, *positional: Any, **keywords: Any) -> Any:
    """Rotate by positions in the micro-batch's own context-parallel group."""
    if run.context is None:
        return forward(attention, *positional, **keywords)
    with run.context.rotary_group(attention, keywords.get("packed_seq_params")):
        return forward(attention, *positional, **keywords)


def layer_forward(run: Run, forward: Function, layer: Any, *positional: Any, **keywords: Any) -> Any:
    """Have the layer's router sum its losses over the micro-batch's own context-parallel group."""
    if run.context is None:
        return forward(layer, *positional, **keywords)
    with run.context.router_group(layer, keywords.get("packed_seq_params")):
        return forward(layer, *positional, **keywords)


def mixer_forward(run: Run, forward: Function, mixer: Any, states: Any, *positional: Any, **keywords: Any) -> Any:
    """Refuse packed sequences which the scan of a Mamba layer would take for one."""
    params = keywords.get("packed_seq_params")
    if params is not None:
        shards = mixer.tp_group.size() if mixer.config.sequence_parallel else 1
        num_tokens = states.shape[0] * shards * mixer.cp.cp_size
        seq_idx = getattr(params, "seq_idx", None)
        if seq_idx is None or seq_idx.shape[-1] != num_tokens:
            found = "none" if seq_idx is None else f"of {seq_idx.shape[-1]} tokens"
            raise BalanceError(
                f"PackedSeqParams.seq_idx is {found} for a micro-batch of {num_tokens} tokens: a Mamba layer "
                "would pass its state from one sequence to the next. Give PackedSeqParams total_tokens, the tokens "
                "of the micro-batch over all context-parallel ranks, or make it by mcore.packed_seq_params."
            )
    return forward(mixer, states, *positional, **keywords)


def apply_expert_bias(run: Run, apply: Function, router: Any, routing_map: Any, padding_mask: Any = None) -> Any:
    """Leave padding out of a map `[num_tokens, num_experts]`."""
    if padding_mask is not None:
        routing_map = routing_map & ~padding_mask.reshape(-1, 1)
    return apply(router, routing_map)


def count_tokens(run: Run, count: Function, *positional: Any, with_padding_mask: bool = False, **keywords: Any) -> Any:
    """Count at least one token, and the same number on every rank of the group.

    An auxiliary loss is a sum over the ranks of `reduce_group`, each of which scales its part by its own number of
    tokens. The mean is returned instead of that number, so that all parts weigh the same.
    """
    per_expert, own, total = count(*positional, with_padding_mask=with_padding_mask, **keywords)
    if not with_padding_mask:
        return per_expert, own, total
    # Whole: Transformer Engine from 2.18 takes no other count in its fused loss (csrc/extensions/router.cpp).
    total = total.round().to(torch.int64).clamp(min=1)
    return per_expert, total / keywords["reduce_group"].size(), total


def get_embeddings(run: Run, get: Function, *positional: Any, padding_mask: Any = None, **keywords: Any) -> Any:
    """Shift tokens and positions for multi-token prediction, and not the padding mask."""
    if padding_mask is None:
        return get(*positional, **keywords)
    input_ids, position_ids, _, *rest = get(*positional, **keywords)
    return input_ids, position_ids, padding_mask, *rest
