"""Splits sequences over context-parallel ranks and gathers them again, without Transformer Engine.

A packed sequence is cut into `2*cp_size` chunks; rank r holds chunks r and `2*cp_size-1-r`, so that
causal attention weighs the same on every rank. A rank keeps its chunks sequence by sequence, in order.
(This is the order of Transformer Engine's `thd_get_partitioned_indices`.)

Invariant: `gather_sequences` over all ranks' `partitioned_indices` restores the micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def partitioned_indices(bounds: Sequence[int], *, cp_size: int, cp_rank: int) -> Tensor:
    """Positions in the micro-batch that a rank holds, in its order.

    Args:
        bounds: `[num_sequences + 1]` starts of the sequences, each a multiple of `2*cp_size` tokens long.
        cp_size: context-parallel ranks.
        cp_rank: this rank.

    Returns:
        `[total_tokens / cp_size]` int64.
    """
    pieces: list[Tensor] = []
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        chunk = (end - start) // (2 * cp_size)
        assert chunk * 2 * cp_size == end - start, (
            f"a sequence of {end - start} tokens does not split into 2*{cp_size} chunks"
        )
        for index in (cp_rank, 2 * cp_size - 1 - cp_rank):
            pieces.append(torch.arange(start + index * chunk, start + (index + 1) * chunk))
    return torch.cat(pieces)


def thd_get_partitioned_indices(cu_seqlens: Tensor, total_tokens: int, cp_size: int, cp_rank: int) -> Tensor:
    """`partitioned_indices` under the name and signature of Transformer Engine's extension."""
    indices = partitioned_indices(cu_seqlens.tolist(), cp_size=cp_size, cp_rank=cp_rank)
    assert indices.numel() * cp_size == total_tokens, f"sequences end at {cu_seqlens[-1]}, not at {total_tokens}"
    return indices.to(cu_seqlens.device)


def split_sequences(
    local: Tensor, *, bounds: Sequence[int], cp_size: int, cp_rank: int
) -> Iterator[tuple[Tensor, int, int]]:
    """The chunks of a rank, one after another.

    Args:
        local: `[total_tokens / cp_size, ...]`, what the rank holds.
        bounds: as in `partitioned_indices`.
        cp_size: context-parallel ranks.
        cp_rank: this rank.

    Yields:
        The chunk, the index of its sequence and where the chunk starts in it.
    """
    chunks = [(end - start) // (2 * cp_size) for start, end in zip(bounds[:-1], bounds[1:], strict=True)]
    # Split at once: the gradient of each slice by itself would be as long as the whole.
    pieces = iter(local.split([chunk for chunk in chunks for _ in range(2)]))
    for sequence, chunk in enumerate(chunks):
        for index in (cp_rank, 2 * cp_size - 1 - cp_rank):
            yield next(pieces), sequence, index * chunk


def gather_sequences(local: Tensor, *, bounds: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """All ranks' chunks in the order of the micro-batch; gradients flow back to the rank they came from.

    Args:
        local: `[total_tokens / cp_size, ...]`.
        bounds: as in `partitioned_indices`.
        group: the context-parallel ranks.

    Returns:
        `[total_tokens, ...]`.
    """
    order = torch.cat([partitioned_indices(bounds, cp_size=group.size(), cp_rank=rank) for rank in range(group.size())])
    inverse = torch.argsort(order).to(local.device)
    return _AllGather.apply(local, group).index_select(0, inverse)  # type: ignore[no-any-return]


class _AllGather(torch.autograd.Function):
    """Concatenation over ranks; the gradient is summed over ranks, and each takes its own part."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(parts, local.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # Not every supported torch has reduce_scatter for gloo; a sum and a slice are equivalent.
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size())[ctx.group.rank()], None
