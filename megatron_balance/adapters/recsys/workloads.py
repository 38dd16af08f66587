"""Computes the cost of a row: the FLOPs of one layer on its sequence, forward and backward, in int64.

HSTU has four projections (query, key, value and the gate U) and no MLP; SID-GR has three and an MLP of four times the
width. Both are layers that the planner's FLOPs know: U is an output gate as wide as the queries. Attention is causal,
and its heads are counted once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.model.shape import ModelShape

MODELS = ("hstu", "sid_gr")
"""Names of the layers with known FLOPs, as upstream's shufflers have them."""


@lru_cache
def layer_cost(model: str, *, num_heads: int, head_dim: int) -> CostModel:
    """The cost of one layer.

    Args:
        model: `hstu` or `sid_gr`.
        num_heads: attention heads.
        head_dim: width of one; the layer is `num_heads * head_dim` wide.

    Raises:
        BalanceError: there is no such model, or a size is not a positive integer.

    Example:
        >>> layer_cost("hstu", num_heads=4, head_dim=256).quadratic  # 3.5 times 2 FLOPs a head's channel
        7168
    """
    if model not in MODELS:
        raise BalanceError(f"model is {model!r}: it must be one of {', '.join(MODELS)}.")
    hidden_size = num_heads * head_dim
    shape = ModelShape(
        hidden_size=hidden_size,
        num_layers=1,
        num_attention_heads=num_heads,
        num_query_groups=num_heads,
        kv_channels=head_dim,
        ffn_hidden_size=4 * hidden_size,
        # ModelShape needs an output layer; one of a single row adds next to nothing.
        padded_vocab_size=1,
        gated_linear_unit=False,
        attention_output_gate=model == "hstu",
        hybrid_layer_pattern="*" if model == "hstu" else "",
    )
    return CostModel.from_shape(shape)


def workloads(lengths: Any, *, cost_model: CostModel, tokens_per_entry: int = 1) -> Any:
    """The cost of sequences in int64, whatever the integer type of their lengths.

    int32 lengths, which a KeyedJaggedTensor often has, would wrap: 8192 tokens at 4 heads of 256 are far over 2**31.

    Args:
        lengths: a tensor, an array or an int.
        cost_model: without windows.
        tokens_per_entry: tokens that one unit of length stands for.

    Returns:
        The same kind of object as `lengths`, int64.
    """
    if isinstance(lengths, torch.Tensor):
        lengths = lengths.to(torch.int64)
    elif not isinstance(lengths, int):
        lengths = np.asarray(lengths, dtype=np.int64)
    num_tokens = lengths * tokens_per_entry
    return cost_model.linear * num_tokens + cost_model.quadratic * num_tokens * num_tokens
