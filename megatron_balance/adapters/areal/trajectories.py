"""Treats AReaL's batches as rows: measures, splits, trims and pads them.

A batch is a dict with `attention_mask` `[num_rows, padded_seq_len]`. A tensor whose first two axes are those of the
mask has an entry a token. A tensor that shares only the first axis has an entry a row, and so has a list of `num_rows`
items. Anything else belongs to the batch as a whole. A trajectory is a batch of one prompt's rows.

Invariants: only whole columns that no row uses are cut, and only along the token axis, so that a hidden tensor
`[num_rows, padded_seq_len, hidden]` keeps its last axis; padding that is put back is 0, which is what AReaL pads with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatron_balance.errors import BalanceError

MASK = "attention_mask"

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
