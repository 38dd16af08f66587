"""Finds where the padding of a batch's rows begins, so that rows become samples of their true length.

A padded (bshd) batch has one sequence a row and padding behind it. Stock Megatron computes the padding and masks its
loss. Attention is causal, so no real token attends to it, and without it loss and gradients are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_balance.errors import BalanceError
from megatron_balance.samples.unpacking import RowError, first_row

ATTENTION_MASK = "attention_mask"
"""The value of `--balance-unpad` for batches whose attention_mask says what is padding."""


def with_row_lengths(batch: Mapping[str, Any], *, padding: int | str) -> dict[str, Any]:
    """The batch with `cu_seqlens`, one sequence a row that ends where padding begins, and without `attention_mask`.

    Args:
        batch: `tokens` `[num_rows, padded_seq_len]`, and `loss_mask` of the same shape where there is padding.
            `attention_mask`: `[num_rows, padded_seq_len]`, nonzero for real tokens, or Megatron's
            `[1 or num_rows, 1, padded_seq_len, padded_seq_len]`, True where a query does not attend to a key.
        padding: the token id of padding, or ATTENTION_MASK. Tokens of that id that carry a loss or are followed by
            others are real: to stock Megatron they are, too.

    Returns:
        The batch; a row of padding alone keeps one token.

    Raises:
        BalanceError: there is no attention_mask to read, it has another shape, or padding has no loss_mask. RowError,
            naming the row: an attention mask with padding before real tokens, or not causal over these.
    """
    mask, loss_mask, tokens = (batch.get(name) for name in (ATTENTION_MASK, "loss_mask", "tokens"))
    batch = {name: value for name, value in batch.items() if name != ATTENTION_MASK}
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or not tokens.numel():
        return batch  # refused, or empty
    if isinstance(padding, int):
        real = tokens != padding
        lengths = _last_place(real if loss_mask is None else real | (loss_mask != 0)) + 1
    elif mask is not None:
        lengths = _lengths_by_mask(mask, tokens=tokens)
    else:
        raise BalanceError(
            "--balance-unpad is attention_mask, and the data has none: give the token id of padding in its place."
        )
    if loss_mask is None and bool((lengths < tokens.shape[1]).any()):
        raise BalanceError(
            "rows are padded and have no loss_mask, so that padding is trained on: add one that is 0 there."
        )
    if mask is not None and mask.dim() == 4:
        _check_causal(mask, lengths=lengths)
    starts = torch.stack([torch.zeros_like(lengths), lengths.clamp(min=1)], dim=1)
    return batch | {"cu_seqlens": starts.to(torch.int32)}


def _last_place(flags: Tensor) -> Tensor:
    """`[num_rows, num_tokens]` → the last place that is set, -1 without one: `[num_rows]`."""
    places = torch.arange(1, flags.shape[1] + 1, device=flags.device)
    return (flags * places).amax(1) - 1


def _lengths_by_mask(mask: Tensor, *, tokens: Tensor) -> Tensor:
    """`[num_rows]` tokens of each row: those that its last query may attend to, or those that are marked."""
    num_rows, num_tokens = tokens.shape
    if mask.dim() == 4 and mask.shape[-2:] == (num_tokens, num_tokens) and len(mask) in (1, num_rows):
        real = ~mask[:, 0, -1].bool().expand(num_rows, -1)
    elif mask.shape == tokens.shape:
        real = mask != 0
    else:
        raise BalanceError(
            f"attention_mask has shape {list(mask.shape)}: it must be {[num_rows, num_tokens]}, nonzero for real "
            f"tokens, or [{num_rows} or 1, 1, {num_tokens}, {num_tokens}], True where a query does not attend to a key."
        )
    lengths = _last_place(real) + 1
    if (row := first_row(real.sum(1) != lengths)) is not None:
        raise RowError(row, "attention_mask has padding before its last real token: pad rows at their end.")
    return lengths


def _check_causal(mask: Tensor, *, lengths: Tensor) -> None:
    """A mask that keeps real tokens apart otherwise than by order cannot be expressed by packing."""
    longest = int(lengths.max())
    later = torch.ones(longest, longest, dtype=torch.bool, device=mask.device).triu(1)
    for row, length in enumerate(lengths.tolist()):
        seen = mask[row % len(mask), 0, :length, :length].bool()
        if not torch.equal(seen, later[:length, :length]):
            raise RowError(
                row,
                "attention_mask is not causal over its real tokens (documents kept apart by the mask, or a prefix that "
                "sees itself): give packed rows with cu_seqlens, or drop --balance-unpad and the balance flags.",
            )
