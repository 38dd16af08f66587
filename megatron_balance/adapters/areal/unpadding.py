"""What was padded together taken apart again, along the token axis.

AReaL's `split_and_unpad_tensor` cuts the last axis of every tensor, which is the token axis only where there are two:
of hidden states `[1, 6, 8]` with 3 tokens it keeps `[1, 6, 3]`. Splitting stays its own; the cut is made here.

Invariant: only the second axis is cut, and where the result has a mask only that of tensors with an entry a token.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_balance.adapters.areal.trajectories import MASK, has_entry_a_token, row_lengths


def with_token_axis_cut(split: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps AReaL's `split_and_unpad_tensor`, with its signature.

    Args:
        split: the original; it takes a tensor or a dict of them apart.
    """

    def split_and_unpad_tensor(
        result: Any, n_trajs: int, traj_group_sizes: list[int] | int = 1, traj_seqlens: list[int] | None = None
    ) -> Any:
        # Lengths that no axis reaches: the original then cuts nothing, and derives none from the mask.
        parts = split(result, n_trajs, traj_group_sizes, [sys.maxsize] * n_trajs)
        if not isinstance(result, (Tensor, dict)):
            return parts
        if isinstance(result, Tensor):
            return parts if traj_seqlens is None else [_cut(*pair) for pair in zip(parts, traj_seqlens, strict=True)]
        has_mask = isinstance(result.get(MASK), Tensor) and result[MASK].dim() == 2
        if traj_seqlens is None:
            if not has_mask:
                return parts
            traj_seqlens = [max(row_lengths(part)) for part in parts]
        return [
            {
                name: _cut(value, length) if not has_mask or has_entry_a_token(value, mask=part[MASK]) else value
                for name, value in part.items()
            }
            for part, length in zip(parts, traj_seqlens, strict=True)
        ]

    return split_and_unpad_tensor


def _cut(value: Any, length: int) -> Any:
    return value[:, :length] if isinstance(value, Tensor) and value.dim() >= 2 else value
