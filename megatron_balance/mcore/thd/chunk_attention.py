"""Causal attention of one chunk of a sequence on a CPU, without a mask.

A chunk of queries sees all keys before it, and those of its own chunk causally. Both are attended to apart and joined
by their log-sum-exps, as ring attention does (Liu et al. 2023, arXiv 2310.01889): torch's CPU kernel computes masked
scores as well, and takes up to three times as long with a mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def attend_chunk(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None) -> Tensor:
    """Attention of the last queries of a sequence.

    Args:
        query: `[b, n, s, d]`, the last s positions of the keys.
        key: `[b, g, k, d]`, k >= s.
        value: as key.
        scale: of scores; by default `d**-0.5`.

    Returns:
        `[b, n, s, d]`.
    """
    if query.shape[2] == 0:
        return query
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    return _ChunkAttention.apply(query, key, value, scale)  # type: ignore[no-any-return]


class _ChunkAttention(torch.autograd.Function):
    """The kernel's backward pass takes the joined output and log-sum-exp: gradients of both parts add up."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        parts = [
            attend(query, key[:, :, keys], value[:, :, keys], 0.0, is_causal, scale=scale)
            for keys, is_causal in _parts(query, key)
        ]
        out, lse = parts[0]
        if len(parts) > 1:
            lse = torch.logaddexp(parts[0][1], parts[1][1])
            weighted = [part * torch.exp(own - lse).unsqueeze(-1) for part, own in parts]
            out = torch.stack(weighted).sum(dim=0).to(query.dtype)  # log-sum-exps of bf16 scores are fp32
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, out, lse = ctx.saved_tensors
        attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        parts = [
            attend_backward(
                grads[0], query, key[:, :, keys], value[:, :, keys], out, lse, 0.0, is_causal, scale=ctx.scale
            )
            for keys, is_causal in _parts(query, key)
        ]
        of_queries, of_keys, of_values = zip(*parts, strict=True)
        return torch.stack(of_queries).sum(dim=0), torch.cat(of_keys, dim=2), torch.cat(of_values, dim=2), None


def _parts(query: Tensor, key: Tensor) -> list[tuple[slice, bool]]:
    """Slices of keys, each with True if attention to them is causal: those before the chunk, if any, and its own."""
    start = key.shape[2] - query.shape[2]
    own = (slice(start, None), True)
    return [(slice(0, start), False), own] if start else [own]
