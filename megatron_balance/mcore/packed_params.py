"""Megatron's description of packed sequences, read from a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


def packed_seq_params(microbatch: Mapping[str, Any]) -> PackedSeqParams:
    """Megatron's PackedSeqParams of a packed micro-batch, for the model.

    Args:
        microbatch: `cu_seqlens` int32 `[1, num_sequences + 1]`, under context parallelism `cu_seqlens_padded` too, and
            `max_seqlen` `[1]`, on the device of the model.
    """
    cu_seqlens: Tensor = microbatch["cu_seqlens"].squeeze(0)
    padded = microbatch.get("cu_seqlens_padded")
    padded = None if padded is None else padded.squeeze(0)
    starts = cu_seqlens if padded is None else padded
    max_seqlen, num_tokens = (int(x) for x in (microbatch["max_seqlen"].max(), starts[-1]))
    # Mamba layers tell sequences apart by `seq_idx`, which is made from this number; without it their state leaks.
    whole: dict[str, Any] = {}
    if "total_tokens" in PackedSeqParams.__dataclass_fields__:
        whole["total_tokens"] = num_tokens
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        cu_seqlens_q_padded=padded,  # pyright: ignore[reportArgumentType]  # Megatron's hint leaves out None
        cu_seqlens_kv_padded=padded,  # pyright: ignore[reportArgumentType]
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
        **whole,
    )
