"""Megatron's stock rows: what its data sets make of lengths, and how a stock run computes them.

Documents are those of GPTDataset, padded and packed rows those of SFTDataset, samples those of a loop of your own. The
filler of a row counts as part of its last sequence, as in `cu_seqlens` of SFTDataset, and costs attention.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_balance.errors import BalanceError
from megatron_balance.lengths.read import Rows

STOCKS = {
    "documents": "rows of joined documents, cut at --seq-length {}, with attention over the whole row",
    "masked-documents": "rows of joined documents, cut at --seq-length {} (--dataloader-inter-document-masking)",
    "padded": "rows of one sample each (--sft), filled up to --seq-length {}",
    "packed": "rows of several samples (--sft), filled up to --seq-length {}",
    "samples": "one sample a micro-batch, without padding",
}
"""What a stock micro-batch is, by kind."""

MEGATRON_SEED = 1234
"""Megatron's default of `--seed`, by which GPTDataset shuffles documents."""


class StockRows(NamedTuple):
    """Rows of a stock run, the tokens that stock fills a row up to, and how many rows it has cut."""

    rows: Rows
    row_tokens: int | None = None
    num_cut: int = 0


def stock_rows(
    rows: Rows, *, kind: str, seq_length: int, seed: int = MEGATRON_SEED, most: int, multiple: int = 1
) -> StockRows:
    """The first `most` rows of a stock run, in its order; filled ones pad samples to a `multiple` of tokens, for CP."""
    if kind not in ("documents", "masked-documents"):
        return _filled(rows, seq_length=seq_length, multiple=multiple)
    joined = _joined(rows, seq_length=seq_length, seed=seed, most=most, masked=kind != "documents")
    return StockRows(joined, seq_length)


def _joined(rows: Rows, *, seq_length: int, seed: int, most: int, masked: bool) -> Rows:
    """Rows of an epoch of GPTDataset: documents in the order of the seed, then rows; each looks at one token more."""
    generator = np.random.RandomState(seed)
    order = np.arange(rows.lengths.size, dtype=np.int32)
    generator.shuffle(order)
    ends = np.cumsum(rows.lengths[order])
    num_rows = max(int(ends[-1]) - 1, 0) // seq_length
    if not num_rows:
        raise BalanceError(f"the documents have {ends[-1]} tokens: a row of --seq-length {seq_length} needs one more.")
    of_rows = np.arange(num_rows, dtype=np.uint32)
    generator.shuffle(of_rows)
    starts = of_rows[:most].astype(np.int64) * seq_length
    if not masked:
        return Rows.of_samples(np.full(starts.size, seq_length))
    first, last = np.searchsorted(ends, starts, "right"), np.searchsorted(ends, starts + seq_length, "left")
    parts = [
        np.diff([start, *ends[low:high], start + seq_length])
        for start, low, high in zip(starts.tolist(), first.tolist(), last.tolist(), strict=True)
    ]
    whole = [part[part > 0] for part in parts]
    return Rows(np.concatenate(whole), np.array([part.size for part in whole]))


def _filled(rows: Rows, *, seq_length: int, multiple: int) -> StockRows:
    """Rows of SFTDataset: what does not fit is cut, and samples behind it are left out."""
    counts, padded = rows.counts, -(-rows.lengths // multiple) * multiple
    row_of, ends = np.repeat(np.arange(counts.size), counts), np.cumsum(padded)
    before = np.concatenate([[0], ends])[np.cumsum(counts) - counts]  # tokens in front of each row
    starts = np.minimum(ends - padded - before[row_of], seq_length)
    kept = np.minimum(rows.lengths, seq_length - starts)
    is_kept = (kept > 0) | (rows.lengths == 0)
    num_cut = int((np.bincount(row_of, rows.lengths, counts.size) > seq_length).sum())
    left = np.bincount(row_of[is_kept], minlength=counts.size)
    return StockRows(Rows(kept[is_kept], left), seq_length, num_cut)
