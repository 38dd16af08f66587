"""Options of mixture of experts: token dispatch, router losses and expert bias."""

from __future__ import annotations

from typing import Any

from megatron_balance.mcore.options.conditions import (
    among,
    both,
    expert_tensors_span_replicas,
    experts_span_replicas,
    given,
    negated,
)
from megatron_balance.mcore.options.option import Option, Support

_FLEX = both(given("num_experts"), among("moe_token_dispatcher_type", "flex"))
_PADDED_TO_THE_GROUP = given("moe_hybridep_pad_uneven_dispatch_inputs", "moe_hybridep_pad_variable_tokens")
_NOT_RUN = (
    "it needs a GPU and is not run by the tests; what it relies on is tested: ranks that exchange tokens run the same "
    "number of micro-batches"
)


def _has_auxiliary_loss(args: Any) -> bool:
    """An auxiliary loss has a weight: a number, or one for each type."""
    weights = getattr(args, "moe_aux_loss_coeff", None) or 0.0
    return bool(getattr(args, "num_experts", None)) and any(weights if isinstance(weights, list) else [weights])


EXPERTS = (
    Option(
        names=("moe_token_dispatcher_type", "expert_model_parallel_size"),
        case="allgather (the default), with experts spread over ranks that hold different micro-batches",
        support=Support.REFUSED,
        when=both(among("moe_token_dispatcher_type", "allgather"), experts_span_replicas),
        because="its all-gathers are of equal sizes, and ranks of a balanced run hold different numbers of tokens",
        remedy="set --moe-token-dispatcher-type alltoall",
    ),
    Option(
        names=("moe_token_dispatcher_type",),
        case="allgather, with each expert group within one model replica",
        support=Support.SUPPORTED,
    ),
    Option(
        names=("expert_tensor_parallel_size", "tensor_model_parallel_size"),
        case="above --tensor-model-parallel-size, so that it reaches over ranks that hold different micro-batches",
        support=Support.REFUSED,
        when=expert_tensors_span_replicas,
        because="every dispatcher gathers over it, and ranks of a balanced run hold different numbers of tokens",
        remedy="set --expert-tensor-parallel-size to --tensor-model-parallel-size or less",
    ),
    Option(
        names=("moe_token_dispatcher_type",),
        also=("expert_model_parallel_size", "expert_tensor_parallel_size", "num_experts"),
        case="alltoall",
        support=Support.SUPPORTED,
    ),
    Option(
        names=("moe_token_dispatcher_type", "moe_flex_dispatcher_backend"),
        also=("moe_enable_deepep",),
        case="flex with deepep",
        support=Support.SUPPORTED,
        when=both(_FLEX, negated(among("moe_flex_dispatcher_backend", "hybridep", "ncclep"))),
        caution=_NOT_RUN,
    ),
    Option(
        names=("moe_flex_dispatcher_backend",),
        also=("moe_hybridep_pad_uneven_dispatch_inputs", "moe_hybridep_pad_variable_tokens"),
        case="hybridep, its inputs padded to those of the group",
        support=Support.SUPPORTED,
        when=both(_FLEX, among("moe_flex_dispatcher_backend", "hybridep"), _PADDED_TO_THE_GROUP),
        caution=_NOT_RUN,
    ),
    Option(
        names=("moe_flex_dispatcher_backend",),
        case="hybridep, its inputs as they are",
        support=Support.REFUSED,
        when=both(_FLEX, among("moe_flex_dispatcher_backend", "hybridep"), negated(_PADDED_TO_THE_GROUP)),
        because="it expects as many tokens from each rank, and ranks of a balanced run hold different numbers",
        remedy="add --moe-hybridep-pad-uneven-dispatch-inputs (from 0.19), or set --moe-token-dispatcher-type alltoall",
    ),
    Option(
        names=("moe_flex_dispatcher_backend",),
        also=(
            "moe_ncclep_static_shape",
            "moe_ncclep_zero_copy",
            "moe_ncclep_use_symm_mem",
            "moe_dispatch_fwd_dtype",
            "moe_combine_bwd_dtype",
        ),
        case="ncclep",
        support=Support.REFUSED,
        when=both(_FLEX, among("moe_flex_dispatcher_backend", "ncclep")),
        because="its buffers are sized by the first micro-batch, and a later one may hold more tokens",
        remedy="set --moe-token-dispatcher-type alltoall",
        first=(0, 19),
    ),
    Option(
        names=("moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity"),
        also=("moe_token_drop_policy",),
        support=Support.REFUSED,
        when=both(given("num_experts"), given("moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity")),
        because="dropped tokens depend on the samples that share a micro-batch, and balancing changes these",
        remedy="drop the capacity factor",
    ),
    Option(
        names=("moe_expert_rank_capacity_factor", "moe_paged_stash"),
        also=(
            "moe_paged_stash_page_size",
            "moe_paged_stash_buffer_size_factor_cuda",
            "moe_paged_stash_buffer_size_factor_cpu",
        ),
        support=Support.REFUSED,
        when=both(given("num_experts"), given("moe_expert_rank_capacity_factor", "moe_paged_stash")),
        because="buffers are sized by tokens of other micro-batches, and tokens beyond them are dropped or end the run",
        remedy="drop it",
        first=(0, 18),
    ),
    Option(
        names=("moe_aux_loss_coeff", "moe_router_load_balancing_type"),
        case="above 0: aux_loss, seq_aux_loss, global_aux_loss",
        support=Support.SUPPORTED,
        when=_has_auxiliary_loss,
        caution="auxiliary losses are computed over the tokens of a micro-batch, so any regrouping changes them "
        "a little; padding counts nowhere",
    ),
    Option(
        names=("moe_z_loss_coeff",),
        support=Support.SUPPORTED,
    ),
    Option(
        names=("moe_router_load_balancing_type",),
        also=("moe_router_quantile_balancing_ema",),
        case="sinkhorn or quantile_balancing",
        support=Support.REFUSED,
        when=both(given("num_experts"), among("moe_router_load_balancing_type", "sinkhorn", "quantile_balancing")),
        because="the route of a token depends on the other tokens of its micro-batch, and balancing changes those",
        remedy="set aux_loss or none, or --moe-router-enable-expert-bias",
    ),
    Option(
        names=("moe_router_enable_expert_bias",),
        also=("moe_router_bias_update_rate",),
        support=Support.SUPPORTED,
    ),
    Option(
        names=("moe_router_force_load_balancing", "moe_router_force_biased", "moe_input_jitter_eps"),
        support=Support.SUPPORTED,
        when=both(
            given("num_experts"),
            given("moe_router_force_load_balancing", "moe_router_force_biased", "moe_input_jitter_eps"),
        ),
        caution="random numbers depend on a token's place in a micro-batch, which balancing changes",
    ),
    Option(
        names=("moe_enable_routing_replay",),
        support=Support.REFUSED,
        when=both(given("num_experts"), given("moe_enable_routing_replay")),
        because="it replays routes in the order in which tokens were recorded, and balancing changes that order",
        remedy="drop it",
    ),
    Option(
        names=("overlap_moe_expert_parallel_comm",),
        also=(
            "delay_wgrad_compute",
            "ep_overlap_early_attn_memory_release",
            "overlap_dispatch_backward_with_experts_wgrad",
        ),
        support=Support.REFUSED,
        when=given("overlap_moe_expert_parallel_comm"),
        because="Megatron's scripts build its schedule without saying where packed sequences begin, so attention "
        "reaches across them",
        remedy="drop it",
    ),
)
