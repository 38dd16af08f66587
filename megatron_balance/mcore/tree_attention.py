"""Attention over a tree of samples that begin alike.

A token attends to those before it whose tokens below, which follow them depth first, end behind it. On GPUs that is a
mask of FlexAttention, which skips blocks without such a pair. Since FlexAttention has no backward pass on CPUs, each
run of tokens that follow one another attends by itself there.

Shapes: t tokens, n heads and g query groups of this tensor-parallel rank, d channels a head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from megatron_balance.samples.prefix_packing import PrefixTree

Attention = Callable[..., Tensor]
"""`attend(query, key, value, scale=…)`: `[t, n, d]` of queries, and of keys and values `[t, g, d]`.

Values may have other channels than queries and keys, which the result has then.
"""


def attention_over(tree: PrefixTree, *, device: torch.device) -> Attention:
    """The attention of a micro-batch on a device."""
    if device.type == "cpu":
        return functools.partial(_attend_by_run, tree)
    return attention_by_block(torch.from_numpy(tree.ends).to(device))


def attention_by_block(ends: Tensor) -> Attention:
    """FlexAttention of tokens with these `PrefixTree.ends`."""

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends[key])

    # Not compiled, it would make an array of all pairs of tokens.
    mask = _compiled(create_block_mask)(sees, None, None, ends.numel(), ends.numel(), device=ends.device)

    def attend(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None) -> Tensor:
        heads_first = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        out = _compiled(flex_attention)(*heads_first, block_mask=mask, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)

    return attend


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


def _attend_by_run(tree: PrefixTree, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None) -> Tensor:
    # Gradients of keys are sums over runs, which narrow formats hold badly.
    dtype = torch.promote_types(query.dtype, torch.float32)
    queries, keys, values = (x.to(dtype).transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    ends, outs = torch.from_numpy(tree.ends), list[Tensor]()
    starts = np.flatnonzero(np.diff(tree.positions, prepend=-2) != 1)
    for start, stop in pairwise([*starts.tolist(), tree.positions.size]):
        seen = (ends[:stop] > start).nonzero().squeeze(1)
        mask = seen <= torch.arange(start, stop).unsqueeze(1)
        run = (queries[:, :, start:stop], keys[:, :, seen], values[:, :, seen])
        outs.append(scaled_dot_product_attention(*run, attn_mask=mask, scale=scale, enable_gqa=True))
    return torch.cat(outs, dim=2)[0].transpose(0, 1).to(query.dtype)
