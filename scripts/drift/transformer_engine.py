"""Definitions of Transformer Engine that packed sequences, context parallelism and FP8 rely on.

Megatron's TEDotProductAttention passes what a balanced micro-batch holds; its extension's
`thd_get_partitioned_indices` is compiled and not read here.
"""

from __future__ import annotations

from drift.relied import Relied

_ATTENTION = "transformer_engine.pytorch.attention.dot_product_attention"
_DOT_PRODUCT = f"{_ATTENTION}.dot_product_attention:DotProductAttention"
_TENSORS = "transformer_engine.pytorch.tensor"

OLDEST = (2, 3)
"""The first release whose attention takes all that Megatron 0.19 passes with packed sequences."""

TRANSFORMER_ENGINE = (
    Relied(
        f"{_DOT_PRODUCT}.forward",
        "takes a packed micro-batch",
        parameters=(
            "qkv_format",
            "cu_seqlens_q",
            "cu_seqlens_kv",
            "cu_seqlens_q_padded",
            "cu_seqlens_kv_padded",
            "max_seqlen_q",
            "max_seqlen_kv",
            "attn_mask_type",
            "pad_between_seqs",
        ),
        names=("thd", "padding"),
        first=OLDEST,
        body=True,
    ),
    Relied(
        _DOT_PRODUCT,
        "is built for the context-parallel group and the window of its layer",
        parameters=("cp_group", "cp_global_ranks", "cp_stream", "cp_comm_type", "window_size"),
        first=OLDEST,
    ),
    Relied(
        f"{_DOT_PRODUCT}.set_context_parallel_group",
        "changes the context-parallel group of a micro-batch",
        parameters=("cp_group", "cp_global_ranks", "cp_stream", "cp_comm_type"),
        first=OLDEST,
        body=True,
    ),
    Relied(
        f"{_ATTENTION}.context_parallel:attn_forward_func_with_cp",
        "says which ways of context-parallel communication take packed sequences",
        parameters=("cu_seqlens_q_padded", "cu_seqlens_kv_padded", "pad_between_seqs", "cp_comm_type", "window_size"),
        names=("thd", "p2p"),
        first=OLDEST,
        body=True,
    ),
    Relied(
        f"{_ATTENTION}.utils:get_attention_backend",
        "chooses a kernel for packed sequences",
        names=("thd", ".pad_between_seqs", ".context_parallel"),
        first=OLDEST,
    ),
    Relied(
        "transformer_engine.pytorch.utils:assert_dim_for_fp8_exec",
        "refuses token counts that are no multiple of 8",
        first=OLDEST,
        body=True,
    ),
    Relied(
        f"{_TENSORS}.mxfp8_tensor:MXFP8Quantizer.is_quantizable",
        "wants token counts in multiples of a block",
        first=OLDEST,
        body=True,
    ),
    Relied(
        f"{_TENSORS}.float8_blockwise_tensor:Float8BlockQuantizer.is_quantizable",
        "wants token counts in multiples of a block",
        first=(2, 6),
        body=True,
    ),
    Relied(
        f"{_TENSORS}.nvfp4_tensor:NVFP4Quantizer.is_quantizable",
        "wants token counts in multiples of a block",
        first=(2, 8),
        body=True,
    ),
)
