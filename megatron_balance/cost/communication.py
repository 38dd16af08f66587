"""Cost of context-parallel communication, from the width of a model's keys and values.

Ring attention passes the keys and values of a token to every other rank of its group: once in the forward pass, once
more in the backward pass, and there their gradients as well (Liu et al. 2023, arXiv 2310.01889, section 3). So a rank
of a group of c receives, for a sample of L tokens, `exchange_bytes_per_token * L * (c-1)/c` bytes. A sliding window
does not shorten the ring. Recomputed layers pass keys and values once more.

The transfer is counted in full. Where attention takes longer than the transfer a ring hides behind it (the same
section), so this is an upper end for long samples.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_balance.errors import BalanceError
from megatron_balance.model.shape import ModelShape


@dataclass(frozen=True)
class Link:
    """Bandwidth between the ranks of a context-parallel group, and the speed of the GPUs it connects.

    Attributes:
        bytes_per_second: received by one GPU.
        flops_per_second: that a GPU reaches in training.

    Raises:
        BalanceError: one is not above zero.

    Example:
        >>> round(BETWEEN_NODES.flops_per_byte)
        8000
    """

    bytes_per_second: float
    flops_per_second: float = 400e12

    def __post_init__(self) -> None:
        for name in ("bytes_per_second", "flops_per_second"):
            if not getattr(self, name) > 0:
                raise BalanceError(f"Link.{name} is {getattr(self, name)!r}: it must be above zero.")

    @property
    def flops_per_byte(self) -> float:
        """FLOPs that a GPU computes while it receives one byte."""
        return self.flops_per_second / self.bytes_per_second


WITHIN_NODE = Link(450e9)
"""NVLink of an H100: 900 GB/s in both directions together (NVIDIA H100 data sheet). 400 TFLOP/s are 40 % of its bf16
peak."""

BETWEEN_NODES = Link(50e9)
"""One 400 Gb/s link a GPU, and an H100 as above."""


def exchange_bytes_per_token(shape: ModelShape, *, bytes_per_number: int = 2, recompute: bool = False) -> int:
    """Bytes of keys, values and their gradients of one token, forward and backward, all layers.

    Args:
        shape: the model.
        bytes_per_number: of an activation (bf16: 2).
        recompute: all layers are recomputed in the backward pass.

    Raises:
        BalanceError: the model has layers that context parallelism does not split by a ring of keys and values.
    """
    passes = 3 + int(recompute)
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
    return passes * numbers * bytes_per_number


def exchange_flops_per_token(
    shape: ModelShape, *, link: Link = BETWEEN_NODES, bytes_per_number: int = 2, recompute: bool = False
) -> int:
    """The time that a rank takes to receive one token's keys and values, in FLOPs: `cp_exchange` of a CostModel.

    Args:
        shape: the model.
        link: between the ranks of a group.
        bytes_per_number: of an activation (bf16: 2).
        recompute: all layers are recomputed in the backward pass.

    Raises:
        BalanceError: the model has layers that context parallelism does not split by a ring of keys and values.

    Example:
        >>> shape = ModelShape.preset("Qwen3-8B")
        >>> exchange_flops_per_token(shape, link=WITHIN_NODE), exchange_flops_per_token(shape, link=BETWEEN_NODES)
        (393216000, 3538944000)
    """
    nbytes = exchange_bytes_per_token(shape, bytes_per_number=bytes_per_number, recompute=recompute)
    return round(nbytes * link.flops_per_byte)
