"""Treats AReaL's batches as rows: measures, splits, trims and pads them.

A batch is a dict with `attention_mask` `[num_rows, padded_seq_len]`. A tensor whose first two axes are those of the
mask has an entry a token. A tensor that shares only the first axis has an entry a row, and so has a list of `num_rows`
items. Anything else belongs to the batch as a whole. A trajectory is a batch of one prompt's rows.

AReaL's own `split_and_unpad_tensor` cuts the last axis of every tensor, which is the token axis only where there are
two: of hidden states `[1, 6, 8]` with 3 tokens it keeps `[1, 6, 3]`. AReaL still splits; the cut is made here.

Invariants: only whole columns that no row uses are cut, and only along the token axis, so that a hidden tensor
`[num_rows, padded_seq_len, hidden]` keeps its last axis; padding that is put back is 0, which is what AReaL pads with.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from megatron_balance.adapters.processor_images import images_of_samples
from megatron_balance.errors import BalanceError
from megatron_balance.model.vision import VisionEncoder
from megatron_balance.planner import Images

MASK = "attention_mask"

MULTI_MODAL = "multi_modal_input"
"""AReaL's list of a processor's outputs, a dict a row."""

Batch = dict[str, Any]


def row_lengths(batch: Mapping[str, Any]) -> list[int]:
    """Tokens of each row, `[num_rows]`: up to the last one that the mask includes.

    Raises:
        BalanceError: there is no mask, or it has no rows.
    """
    mask = batch.get(MASK)
    if not isinstance(mask, Tensor) or mask.dim() != 2 or not len(mask):
        seen = f"of shape {list(mask.shape)}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        raise BalanceError(
            f"a trajectory's {MASK} is {seen}: it must be a tensor [num_rows, padded_seq_len] of one row or more."
        )
    positions = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return torch.where(mask != 0, positions, 0).amax(dim=1).tolist() if mask.shape[1] else [0] * len(mask)


def images_of_items(items: Sequence[Mapping[str, Any]], *, encoder: VisionEncoder | None) -> Images | None:
    """The images of all rows of each item, by what is known of handles (`RTensor`); None where images cost nothing.

    Raises:
        BalanceError: a grid or pixels have a shape that is not known.
    """
    if encoder is None:
        return None
    sums = np.zeros((len(items), 2), dtype=np.int64)
    for index, item in enumerate(items):
        rows = [
            {name: value if isinstance(value, Tensor) else getattr(value, "data", None) for name, value in row.items()}
            for row in item.get(MULTI_MODAL) or ()
        ]
        sums[index] = images_of_samples(rows, encoder=encoder).sums.sum(axis=0)
    return Images(sums)


def has_entry_a_token(value: object, *, mask: Tensor) -> bool:
    """True if a value of a batch is a tensor `[num_rows, padded_seq_len, ...]`."""
    return isinstance(value, Tensor) and value.dim() >= 2 and value.shape[:2] == mask.shape


def trimmed(batch: Mapping[str, Any]) -> Batch:
    """The batch without the columns of padding that none of its rows uses; other values are the same objects."""
    mask, longest = batch[MASK], max(row_lengths(batch))
    return {name: value[:, :longest] if has_entry_a_token(value, mask=mask) else value for name, value in batch.items()}


def split_rows(batch: Mapping[str, Any]) -> list[Batch]:
    """One batch of a single row, without padding, for each row."""
    mask = batch[MASK]
    rows: list[Batch] = []
    for row, length in enumerate(row_lengths(batch)):
        of_row: Batch = {}
        for name, value in batch.items():
            if has_entry_a_token(value, mask=mask):
                of_row[name] = value[row : row + 1, :length]
            elif _has_entry_a_row(value, num_rows=len(mask)):
                of_row[name] = value[row : row + 1]
            else:
                of_row[name] = value
        rows.append(of_row)
    return rows


def join_rows(batches: Sequence[Mapping[str, Any]]) -> Batch:
    """One batch of all their rows, in order, padded with 0 at the end of every axis but the first.

    Args:
        batches: one or more, with the same keys.

    Raises:
        BalanceError: there are none, or their keys or the number of axes of a key differ.
    """
    if not batches:
        raise BalanceError("join_rows got no batches: it needs one or more.")
    first = batches[0]
    for index, batch in enumerate(batches):
        if batch.keys() != first.keys():
            raise BalanceError(
                f"batch {index} has the keys {sorted(batch)} and batch 0 has {sorted(first)}: they must be the same."
            )
    joined: Batch = {}
    for name, value in first.items():
        values = [batch[name] for batch in batches]
        if isinstance(value, Tensor) and value.dim():
            joined[name] = _padded_together(values, name=name)
        elif isinstance(value, list):
            joined[name] = [entry for entries in values for entry in entries]
        else:
            joined[name] = value
    return joined


def _has_entry_a_row(value: object, *, num_rows: int) -> bool:
    if isinstance(value, Tensor):
        return value.dim() >= 1 and value.shape[0] == num_rows
    return isinstance(value, list) and len(value) == num_rows


def _padded_together(tensors: Sequence[Tensor], *, name: str) -> Tensor:
    """`[num_rows_i, *axes_i]` → `[sum of num_rows_i, *largest axes]`."""
    num_axes = {tensor.dim() for tensor in tensors}
    if len(num_axes) != 1:
        raise BalanceError(f"{name!r} has {sorted(num_axes)} axes in different batches: it must have the same in all.")
    largest = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    padded: list[Tensor] = []
    for tensor in tensors:
        missing = [size - here for size, here in zip(largest, tensor.shape[1:], strict=True)]
        # functional.pad counts axes from the last one.
        widths = [width for size in reversed(missing) for width in (0, size)]
        padded.append(functional.pad(tensor, widths) if any(missing) else tensor)
    return torch.cat(padded)


def with_token_axis_cut(split: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps AReaL's `split_and_unpad_tensor`, which splits a tensor or a dict of tensors."""

    def split_and_unpad_tensor(
        result: Any, n_trajs: int, traj_group_sizes: list[int] | int = 1, traj_seqlens: list[int] | None = None
    ) -> Any:
        # No axis is as long as these lengths: the original then cuts nothing, and derives none from the mask.
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
