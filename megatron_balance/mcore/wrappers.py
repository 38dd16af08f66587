"""Replacements for Megatron's functions; `hooks.py` lists them with reasons.

Each takes the function and returns its replacement, which calls it. Without a balance flag, and outside a balanced
step, the replacement only calls Megatron's function.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from megatron_balance.errors import BalanceError
from megatron_balance.hooking.patches import Function
from megatron_balance.mcore.current_run import current, run_of_process
from megatron_balance.mcore.setup.arguments import BalanceConfig
from megatron_balance.mcore.setup.flags import add_balance_args


def with_balance_arguments(add_megatron_arguments: Function) -> Function:
    """Add the balance flags to Megatron's parser."""

    @functools.wraps(add_megatron_arguments)
    def wrapper(parser: Any) -> Any:
        return add_balance_args(add_megatron_arguments(parser))

    return wrapper


def with_options_checked(inprocess_restart: Function) -> Function:
    """Refuse options before a training is wrapped that starts again after every error, and would never end."""

    @functools.wraps(inprocess_restart)
    def wrapper(train: Any, args: Any) -> Any:
        BalanceConfig.from_megatron_args(args)
        return inprocess_restart(train, args)

    return wrapper


def with_balanced_schedule(get_forward_backward_func: Function) -> Function:
    """Return a schedule that balances the step, in a balanced run."""

    @functools.wraps(get_forward_backward_func)
    def wrapper(*positional: Any, **keywords: Any) -> Function:
        schedule = get_forward_backward_func(*positional, **keywords)
        balanced = run_of_process()
        return schedule if balanced is None else functools.partial(balanced, schedule)

    return wrapper


def with_balanced_evaluation(evaluate: Function) -> Function:
    """Balance the forward-only steps of an evaluation, where the run does."""
    signature = inspect.signature(evaluate)

    @functools.wraps(evaluate)
    def wrapper(*positional: Any, **keywords: Any) -> Any:
        from megatron.training import get_args

        balanced = run_of_process()
        if balanced is None or balanced.evaluation is None:
            return evaluate(*positional, **keywords)
        args: Any = get_args()
        given = signature.bind(*positional, **keywords).arguments.get("eval_iters")
        with balanced.evaluation.running(args.eval_iters if given is None else given):
            return evaluate(*positional, **keywords)

    return wrapper


def with_record_flushed(save_checkpoint: Function) -> Function:
    """Write the record to its end with a checkpoint, so that a run that resumes from here finds it whole."""

    @functools.wraps(save_checkpoint)
    def wrapper(*positional: Any, **keywords: Any) -> Any:
        balanced = current()
        if balanced is not None and balanced.observer is not None and not keywords.get("non_persistent_ckpt"):
            balanced.observer.flush()
        return save_checkpoint(*positional, **keywords)

    return wrapper


def with_backward_timed(backward_step: Function) -> Function:
    """Time a backward pass while a run balances."""

    @functools.wraps(backward_step)
    def wrapper(*positional: Any, **keywords: Any) -> Any:
        balanced = current()
        if balanced is None or balanced.observer is None:
            return backward_step(*positional, **keywords)
        with balanced.observer.backward():
            return backward_step(*positional, **keywords)

    return wrapper


def with_documents_split(split_whole_row: Function) -> Function:
    """Split packed sequences by document, not the whole row, over context-parallel ranks."""

    @functools.wraps(split_whole_row)
    def wrapper(batch: Any, cp_group: Any) -> Any:
        from megatron.core import utils

        return utils._get_batch_on_this_cp_rank_per_document_balancing(batch, cp_group)

    return wrapper


def with_planned_shapes(communicate_shapes: Function) -> Function:
    """Take the shapes of a step's messages from its plan."""

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


def with_group_of_the_microbatch(attention_forward: Function) -> Function:
    """`Attention.forward` that rotates by positions in the micro-batch's own context-parallel group."""

    @functools.wraps(attention_forward)
    def wrapper(attention: Any, *positional: Any, **keywords: Any) -> Any:
        balanced = current()
        if balanced is None or balanced.context is None:
            return attention_forward(attention, *positional, **keywords)
        with balanced.context.rotary_group(attention, keywords.get("packed_seq_params")):
            return attention_forward(attention, *positional, **keywords)

    return wrapper


def with_router_group_of_the_microbatch(layer_forward: Function) -> Function:
    """`TransformerLayer.forward` whose router sums its losses over the micro-batch's own context-parallel group."""

    @functools.wraps(layer_forward)
    def wrapper(layer: Any, *positional: Any, **keywords: Any) -> Any:
        balanced = current()
        if balanced is None or balanced.context is None:
            return layer_forward(layer, *positional, **keywords)
        with balanced.context.router_group(layer, keywords.get("packed_seq_params")):
            return layer_forward(layer, *positional, **keywords)

    return wrapper


def with_sequences_told_apart(mixer_forward: Function) -> Function:
    """`MambaMixer.forward` that refuses packed sequences which the scan would take for one."""

    @functools.wraps(mixer_forward)
    def wrapper(mixer: Any, hidden_states: Any, *positional: Any, **keywords: Any) -> Any:
        params = keywords.get("packed_seq_params")
        if params is not None:
            shards = mixer.tp_group.size() if mixer.config.sequence_parallel else 1
            num_tokens = hidden_states.shape[0] * shards * mixer.cp.cp_size
            seq_idx = getattr(params, "seq_idx", None)
            if seq_idx is None or seq_idx.shape[-1] != num_tokens:
                found = "none" if seq_idx is None else f"of {seq_idx.shape[-1]} tokens"
                raise BalanceError(
                    f"PackedSeqParams.seq_idx is {found} for a micro-batch of {num_tokens} tokens: a Mamba layer "
                    "would pass its state from one sequence to the next. Give PackedSeqParams total_tokens, the tokens "
                    "of the micro-batch over all context-parallel ranks, or make it by mcore.packed_seq_params."
                )
        return mixer_forward(mixer, hidden_states, *positional, **keywords)

    return wrapper


def expert_bias_of_real_tokens(apply_expert_bias: Function) -> Function:
    """`TopKRouter._apply_expert_bias` that leaves padding out of a map `[num_tokens, num_experts]`."""

    @functools.wraps(apply_expert_bias)
    def wrapper(router: Any, routing_map: Any, padding_mask: Any = None) -> Any:
        if padding_mask is not None:
            routing_map = routing_map & ~padding_mask.reshape(-1, 1)
        return apply_expert_bias(router, routing_map)

    return wrapper


def counts_of_real_tokens(count: Function) -> Function:
    """`get_tokens_per_expert_and_token_count` with at least one token, and the same number on every rank of the group.

    An auxiliary loss is a sum over the ranks of `reduce_group`, each of which scales its part by its own number of
    tokens. The mean is returned instead of that number, so that all parts weigh the same.
    """

    @functools.wraps(count)
    def wrapper(*positional: Any, with_padding_mask: bool = False, **keywords: Any) -> Any:
        per_expert, own, total = count(*positional, with_padding_mask=with_padding_mask, **keywords)
        if not with_padding_mask:
            return per_expert, own, total
        # Whole: Transformer Engine from 2.18 takes no other count in its fused loss (csrc/extensions/router.cpp).
        total = total.round().to(torch.int64).clamp(min=1)
        return per_expert, total / keywords["reduce_group"].size(), total

    return wrapper


def embeddings_with_mask_in_place(get_embeddings: Function) -> Function:
    """`MultiTokenPredictionLayer._get_embeddings` that shifts tokens and positions, and not the padding mask."""

    @functools.wraps(get_embeddings)
    def wrapper(*positional: Any, padding_mask: Any = None, **keywords: Any) -> Any:
        if padding_mask is None:
            return get_embeddings(*positional, **keywords)
        input_ids, position_ids, _, *rest = get_embeddings(*positional, **keywords)
        return input_ids, position_ids, padding_mask, *rest

    return wrapper


def with_figures_logged(training_log: Function) -> Function:
    """Log the figures of balancing after Megatron's own."""

    @functools.wraps(training_log)
    def wrapper(*positional: Any, **keywords: Any) -> Any:
        result = training_log(*positional, **keywords)
        balanced = current()
        if balanced is not None:
            balanced.logged()
        return result

    return wrapper


def while_balancing(wrap: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """A wrapper that takes effect in balanced steps only."""

    def of(function: Function) -> Function:
        wrapped = wrap(function)

        @functools.wraps(function)
        def wrapper(*positional: Any, **keywords: Any) -> Any:
            balanced = current()
            in_step = balanced is not None and balanced.in_step
            return (wrapped if in_step else function)(*positional, **keywords)

        return wrapper

    return of
