"""Time of context-parallel communication, from the width of a model's keys and values.

Ring attention passes the keys and values of a token to every other rank of its group: once in the forward pass, once
more in the backward pass, and there their gradients as well (Liu et al. 2023, arXiv 2310.01889, section 3). So a rank
of a group of c receives, for a sample of L tokens, `exchange_bytes_per_token * L * (c-1)/c` bytes. A sliding window
does not shorten the ring. Recomputed layers pass keys and values once more. What attention hides of it is counted in
`CostModel.at_cp_size`.
"""

from __future__ import annotations

from typing import Any

from megatron_balance.errors import BalanceError
from megatron_balance.model.shape import ModelShape

WITHIN_NODE = 450e9
"""Bytes a second that one GPU receives by NVLink: an H100 has 900 GB/s in both directions (NVIDIA H100 data sheet)."""

BETWEEN_NODES = 50e9
"""Bytes a second over one 400 Gb/s link a GPU."""

ASSUMED_TFLOPS = 400.0
"""Of an H100 in training, to compare a time with FLOPs where no rate is known: 40 % of its bf16 peak."""


def exchange_bytes_per_token(shape: ModelShape, *, bytes_per_number: int = 2, recompute: bool = False) -> int:
    """Bytes of keys, values and their gradients of one token, forward and backward, all layers.

    Args:
        shape: the model.
        bytes_per_number: of an activation (bf16: 2).
        recompute: all layers are recomputed in the backward pass.

    Raises:
        BalanceError: the model has layers that context parallelism does not split by a ring of keys and values.
    """
    numbers = 0
    for layer in (*shape.decoder_layers(), *shape.mtp_layers()):
        if layer.mixer == "attention":
            numbers += 2 * shape.num_query_groups * shape.kv_channels
        elif layer.mixer == "mla":  # uncompressed, as it is trained
            numbers += shape.num_attention_heads * (shape.qk_head_dim + shape.qk_pos_emb_head_dim + shape.v_head_dim)
        elif layer.mixer is not None:
            raise BalanceError(
                f"The model has {layer.mixer} layers, whose context-parallel communication is not that of a ring of "
                "keys and values: give cp_exchange, or keep --context-parallel-size for all samples."
            )
    return (3 + recompute) * numbers * bytes_per_number


def exchange_flops_per_token(
    shape: ModelShape, *, bytes_per_second: float, tflops: float = ASSUMED_TFLOPS, **passes: Any
) -> int:
    """FLOPs in the time that a rank takes to receive one token's keys and values: `cp_exchange` of a CostModel.

    Args:
        shape: the model.
        bytes_per_second: that a GPU receives.
        tflops: 10**12 FLOP/s of what is linear in tokens, on one GPU.
        passes: `bytes_per_number` and `recompute`, as for `exchange_bytes_per_token`.

    Example:
        >>> shape = ModelShape.preset("Qwen3-8B")
        >>> [exchange_flops_per_token(shape, bytes_per_second=link) for link in (WITHIN_NODE, BETWEEN_NODES)]
        [393216000, 3538944000]
    """
    return round(exchange_bytes_per_token(shape, **passes) * tflops * 1e12 / bytes_per_second)
