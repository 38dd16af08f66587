"""`--balance-context-parallel`, where each micro-batch runs in a context-parallel group of its own."""

from __future__ import annotations

from typing import Any

from megatron_balance.mcore.options.conditions import (
    among,
    both,
    either,
    experts_span_ranks,
    given,
    megatron_before,
    negated,
    unpads,
)
from megatron_balance.mcore.options.option import Option, Support

_DYNAMIC = given("balance_context_parallel")
_WITH = "with --balance-context-parallel"


def _has_aux_loss(args: Any) -> bool:
    """Routers add a loss over the tokens of a context-parallel group."""
    weights = getattr(args, "moe_aux_loss_coeff", None) or 0.0
    return bool(getattr(args, "num_experts", None)) and any(weights if isinstance(weights, list) else [weights])


def _bucket_splits_unevenly(args: Any) -> bool:
    bucket = args.balance_shape_bucket
    return bucket > 1 and bucket % (2 * (getattr(args, "tensor_model_parallel_size", None) or 1)) != 0


DYNAMIC_CP = (
    Option(
        names=("context_parallel_size", "balance_context_parallel"),
        case=f"{_WITH}: the size of evaluation, which stays stock",
        support=Support.SUPPORTED,
    ),
    Option(
        names=("transformer_impl", "balance_context_parallel"),
        case=f"transformer_engine, {_WITH}",
        support=Support.SUPPORTED,
        when=both(_DYNAMIC, negated(among("transformer_impl", "local"))),
        caution="it needs several GPUs, and the tests run it on CPU ranks alone, with another attention: compare the "
        "first losses with those of a run without it",
    ),
    Option(
        names=("multi_latent_attention", "balance_context_parallel"),
        case=_WITH,
        support=Support.REFUSED,
        when=both(_DYNAMIC, given("multi_latent_attention")),
        because="Megatron asserts that its micro-batches name no group: its rotary angles are those of the static one",
        remedy="drop --balance-context-parallel",
    ),
    Option(
        names=("mtp_num_layers", "balance_context_parallel"),
        case=_WITH,
        support=Support.REFUSED,
        when=both(_DYNAMIC, given("mtp_num_layers")),
        because="tokens are shifted within the static context-parallel group, whose ranks weigh parts by themselves",
        remedy="drop --balance-context-parallel",
    ),
    Option(
        names=("window_size", "balance_context_parallel"),
        case=_WITH,
        support=Support.REFUSED,
        when=both(_DYNAMIC, given("window_size")),
        because="Transformer Engine takes no window where context-parallel ranks pass keys on (p2p)",
        remedy="drop one of them",
    ),
    Option(
        names=("cp_comm_type", "balance_context_parallel"),
        case=f"a2a, all_gather or a2a+p2p, {_WITH}",
        support=Support.REFUSED,
        when=both(_DYNAMIC, among("cp_comm_type", "a2a", "all_gather", "allgather", "a2a+p2p")),
        because="no test here runs packed sequences with it",
        remedy="set --cp-comm-type p2p",
    ),
    Option(
        names=("moe_aux_loss_coeff", "moe_z_loss_coeff", "balance_context_parallel"),
        case=_WITH,
        support=Support.SUPPORTED,
    ),
    Option(
        names=("moe_router_load_balancing_type", "balance_context_parallel"),
        case=f"global_aux_loss, {_WITH}",
        support=Support.REFUSED,
        when=both(_DYNAMIC, _has_aux_loss, among("moe_router_load_balancing_type", "global_aux_loss")),
        because="all ranks meet for it in every micro-batch, of which they may run different numbers",
        remedy="set aux_loss or seq_aux_loss, or drop --balance-context-parallel",
    ),
    Option(
        names=("recompute_modules", "moe_layer_recompute", "balance_context_parallel"),
        case=f"moe, with an auxiliary loss, {_WITH}",
        support=Support.REFUSED,
        when=both(_DYNAMIC, _has_aux_loss, either(among("recompute_modules", "moe"), given("moe_layer_recompute"))),
        because="the router runs again in the backward pass, where the group of its micro-batch is not known",
        remedy="drop moe from --recompute-modules, or set --recompute-granularity full",
    ),
    Option(
        names=("moe_token_dispatcher_type", "balance_context_parallel"),
        case=f"allgather (the default), with experts spread over ranks, {_WITH}",
        support=Support.REFUSED,
        when=both(_DYNAMIC, among("moe_token_dispatcher_type", "allgather"), experts_span_ranks),
        because="its all-gathers are of equal sizes, and context-parallel ranks hold different micro-batches",
        remedy="set --moe-token-dispatcher-type alltoall",
    ),
    Option(
        names=("use_megatron_fsdp", "use_torch_fsdp2", "balance_context_parallel"),
        case=_WITH,
        support=Support.REFUSED,
        when=both(_DYNAMIC, given("use_megatron_fsdp", "use_torch_fsdp2")),
        because="no test here runs them together",
        remedy="set --use-distributed-optimizer in place of FSDP, or drop --balance-context-parallel",
    ),
)
"""Megatron's options."""

DYNAMIC_CP_FLAGS = (
    Option(
        names=("balance_shape_bucket", "balance_context_parallel"),
        case=f"no multiple of 2 * --tensor-model-parallel-size, {_WITH}",
        support=Support.REFUSED,
        when=both(_DYNAMIC, _bucket_splits_unevenly),
        because="a rank that shares a sequence holds two chunks, each of which tensor-parallel ranks may split",
        remedy="set such a multiple",
    ),
    Option(
        names=("balance_context_parallel",),
        case="on Megatron Core before 0.19",
        support=Support.REFUSED,
        when=both(_DYNAMIC, megatron_before(0, 19)),
        because="packed sequences name no context-parallel group there",
        remedy="install megatron-core 0.19, or drop it",
    ),
    Option(
        names=("balance_unpad", "balance_context_parallel"),
        case=f"set, {_WITH}",
        support=Support.REFUSED,
        when=both(_DYNAMIC, unpads),
        because="scripts for padded rows split a whole row over context-parallel ranks, and a pack is split sample by "
        "sample",
        remedy="drop it, or give packed rows",
    ),
    *(
        Option(
            names=(name, "balance_context_parallel"),
            case=f"other than auto, {_WITH}",
            support=Support.REFUSED,
            when=both(_DYNAMIC, negated(among(name, "auto"))),
            because="it has one algorithm, and which plans run at all follows from who waits for whom",
            remedy="set auto",
        )
        for name in ("balance_objective", "balance_algorithm")
    ),
)
"""The balance flags among themselves; part of BALANCE_FLAGS."""
