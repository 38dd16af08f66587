"""Options of model families: linear attention, Mamba hybrids, sinks and windows, sparse attention, mRoPE.

Sources: megatron/core of 0.19.2: ssm/gated_delta_net, ssm/mamba_mixer.py, transformer/experimental_attention_variant,
transformer_config.py; for Transformer Engine attention/dot_product_attention/context_parallel.py of 2.8 to 2.20.
"""

from __future__ import annotations

from typing import Any

from megatron_balance.mcore.options.conditions import (
    above,
    among,
    both,
    either,
    engine_before,
    given,
    megatron_before,
    negated,
)
from megatron_balance.mcore.options.option import Option, Support

_DYNAMIC = given("balance_context_parallel")
_CP = above("context_parallel_size", 1)
_PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern", "mtp_hybrid_override_pattern")
_VARIANT = ("experimental_attention_variant", "linear_attention_type")
_KEYS_PASSED_ON = negated(among("cp_comm_type", "a2a", "all_gather", "allgather"))
_SINKS = among("softmax_type", "off-by-one", "learnable")
_MROPE = among("position_embedding_type", "mrope")


def _has_mamba_layers(args: Any) -> bool:
    return any("M" in (getattr(args, name, None) or "") for name in _PATTERNS)


def _has_delta_net(args: Any) -> bool:
    variant = any(getattr(args, name, None) == "gated_delta_net" for name in _VARIANT)
    return variant or any("G" in (getattr(args, name, None) or "") for name in _PATTERNS)


def _has_sparse_attention(args: Any) -> bool:
    variant = getattr(args, "experimental_attention_variant", None) == "dsa"
    return variant or any("D" in (getattr(args, name, None) or "") for name in _PATTERNS)


FAMILIES = (
    Option(
        names=(*_VARIANT, *_PATTERNS),
        case="gated_delta_net",
        support=Support.SUPPORTED,
    ),
    Option(
        names=(*_VARIANT, "hybrid_layer_pattern", "deterministic_mode"),
        case="gated_delta_net with --deterministic-mode",
        support=Support.REFUSED,
        when=both(_has_delta_net, given("deterministic_mode")),
        because="Megatron's deterministic kernel takes no packed sequences",
        remedy="drop --deterministic-mode",
    ),
    Option(
        names=(*_VARIANT, "hybrid_layer_pattern", "balance_context_parallel"),
        case="gated_delta_net with --balance-context-parallel",
        support=Support.REFUSED,
        when=both(_has_delta_net, _DYNAMIC),
        because="its layers exchange heads in the static context-parallel group, whatever group a micro-batch has",
        remedy="set --context-parallel-size in its place",
    ),
    Option(
        names=("hybrid_layer_pattern", "is_hybrid_model"),
        also=("mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads"),
        case="with Mamba layers",
        support=Support.SUPPORTED,
        first=(0, 19),
    ),
    Option(
        names=_PATTERNS,
        case="with Mamba layers, before 0.19",
        support=Support.REFUSED,
        when=both(_has_mamba_layers, megatron_before(0, 19)),
        because="Megatron hands its layers no bounds of packed sequences, so that a state passes from one to the next",
        remedy="install megatron-core 0.19",
        last=(0, 18),
    ),
    Option(
        names=(*_PATTERNS, "use_mamba_mem_eff_path"),
        case="with Mamba layers and --disable-mamba-mem-eff-path",
        support=Support.REFUSED,
        when=both(_has_mamba_layers, negated(given("use_mamba_mem_eff_path"))),
        because="that path passes a state from one packed sequence to the next",
        remedy="drop --disable-mamba-mem-eff-path",
        first=(0, 19),
    ),
    Option(
        names=(*_PATTERNS, "balance_context_parallel"),
        case="with Mamba layers and --balance-context-parallel",
        support=Support.REFUSED,
        when=both(_has_mamba_layers, _DYNAMIC),
        because="its layers exchange heads in the static context-parallel group, whatever group a micro-batch has",
        remedy="set --context-parallel-size in its place",
    ),
    Option(
        names=("softmax_type",),
        case="off-by-one or learnable",
        support=Support.SUPPORTED,
        when=both(_SINKS, negated(among("transformer_impl", "local"))),
        caution="Transformer Engine's fused kernel takes packed sequences with it from cuDNN 9.18; a slower one runs "
        "where that is older",
    ),
    Option(
        names=("softmax_type",),
        case="off-by-one or learnable, with transformer_engine before 2.8",
        support=Support.REFUSED,
        when=both(_SINKS, engine_before(2, 8)),
        because="its attention has no such softmax",
        remedy="install transformer-engine 2.8 or newer",
    ),
    Option(
        names=("softmax_type", "context_parallel_size"),
        case="off-by-one or learnable, with --context-parallel-size above 1 and keys passed on (p2p)",
        support=Support.REFUSED,
        when=both(_SINKS, _CP, negated(among("cp_comm_type", "a2a"))),
        because="Transformer Engine has such a softmax under context parallelism by a2a alone",
        remedy="set --cp-comm-type a2a, or --context-parallel-size 1",
    ),
    Option(
        names=("softmax_type", "balance_context_parallel"),
        case="off-by-one or learnable, with --balance-context-parallel",
        support=Support.REFUSED,
        when=both(_SINKS, _DYNAMIC),
        because="Transformer Engine has such a softmax under context parallelism by a2a alone, of one static group",
        remedy="set --context-parallel-size and --cp-comm-type a2a in its place",
    ),
    Option(
        names=("window_size", "window_attn_skip_freq"),
        support=Support.SUPPORTED,
    ),
    Option(
        names=("window_size", "context_parallel_size"),
        case="with --context-parallel-size above 1 and keys passed on (p2p)",
        support=Support.REFUSED,
        when=both(given("window_size"), _CP, _KEYS_PASSED_ON),
        because="Transformer Engine takes no window where context-parallel ranks pass keys on",
        remedy="set --cp-comm-type a2a or all_gather, or --context-parallel-size 1",
    ),
    Option(
        names=("experimental_attention_variant", *_PATTERNS),
        also=("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk", "dsa_kernel_backend"),
        case="dsa",
        support=Support.SUPPORTED,
        when=_has_sparse_attention,
        caution="the indexer's ReLU gives many keys the score 0, and which of these it chooses depends on the "
        "micro-batch: losses differ a little from those of another grouping",
    ),
    Option(
        names=("experimental_attention_variant", "dsa_indexer_loss_coeff"),
        also=("dsa_indexer_use_sparse_loss",),
        case="dsa with --dsa-indexer-loss-coeff above 0",
        support=Support.REFUSED,
        when=both(_has_sparse_attention, above("dsa_indexer_loss_coeff", 0)),
        because="the indexer's loss is a mean over all tokens of a micro-batch, padding and dummies included",
        remedy="set --dsa-indexer-loss-coeff 0",
    ),
    Option(
        names=("experimental_attention_variant", "balance_context_parallel"),
        case="dsa with --balance-context-parallel",
        support=Support.REFUSED,
        when=both(_has_sparse_attention, _DYNAMIC),
        because="it gathers keys in the static context-parallel group, whatever group a micro-batch has",
        remedy="set --context-parallel-size in its place",
    ),
    Option(
        names=("position_embedding_type",),
        also=("mrope_section", "mrope_interleaved"),
        case="mrope, with position_ids [3, micro_batch_size, seq_length]",
        support=Support.SUPPORTED,
    ),
    Option(
        names=("position_embedding_type", "context_parallel_size"),
        case="mrope with --context-parallel-size above 1",
        support=Support.REFUSED,
        when=both(_MROPE, either(_CP, _DYNAMIC)),
        because="Megatron cuts the angles of the whole micro-batch, not of each sequence, so that tokens get positions "
        "of others",
        remedy="set --context-parallel-size 1, or train on Megatron's dev branch, which cuts each sequence "
        "(packed_seq of get_pos_emb_on_this_cp_rank)",
    ),
    Option(
        names=("position_embedding_type", "apply_rope_fusion"),
        case="mrope with --apply-rope-fusion",
        support=Support.REFUSED,
        when=both(_MROPE, given("apply_rope_fusion")),
        because="the fused kernel takes the angles of the first tokens for every packed sequence",
        remedy="set --no-rope-fusion",
    ),
)
