"""Draws samples of named distributions, and makes of samples the rows that stock Megatron makes.

Documents are those of GPTDataset, padded and packed rows those of SFTDataset, samples those of a loop of your own. The
filler of a row counts as part of its last sequence, as in `cu_seqlens` of SFTDataset, and costs attention.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError, check_integer

MAX_LENGTHS = 2**25
"""Most lengths that are read or drawn, whatever a small file unpacks to."""

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

_BLOCK = 4096
"""Candidates drawn at a time: fixed, so that the first samples do not depend on num_samples."""

SYNTHETIC_LENGTHS: dict[str, dict[str, Any]] = json.loads(
    (files(__package__) / "synthetic.json").read_text(encoding="utf-8")
)
"""By name a mixture of lognormal distributions, cut to `[shortest, longest]` tokens and fitted to a public data set.

`of` is the data set, none of which is kept, in cl100k_base tokens or in those that the service published; `components`
are share, mean and standard deviation of the logarithm of the length, and `fit_distance` is the Kolmogorov-Smirnov
distance to the set: the largest gap between the cumulative distributions.
"""


class Rows(NamedTuple):
    """Rows of a data set, or of a stock run.

    `lengths` are `[num_sequences]` tokens of every sequence, `counts` `[num_rows]` sequences of each row, `row_tokens`
    the tokens that stock fills a row up to, and `num_cut` the rows that it has cut.
    """

    lengths: NDArray[np.int64]
    counts: NDArray[np.int64]
    row_tokens: int | None = None
    num_cut: int = 0

    @classmethod
    def from_samples(cls, lengths: NDArray[np.int64], *, row_tokens: int | None = None) -> Rows:
        """A row for each sample."""
        return cls(lengths, np.ones(lengths.size, dtype=np.int64), row_tokens)

    def permuted(self, order: NDArray[np.int64]) -> Rows:
        """Rows in another order."""
        rows = np.split(self.lengths, np.cumsum(self.counts)[:-1])
        return Rows(np.concatenate([rows[row] for row in order.tolist()]), self.counts[order])


def joined_rows(documents: NDArray[np.int64], *, seq_length: int, seed: int, limit: int, is_masked: bool) -> Rows:
    """The first `limit` rows of an epoch of GPTDataset: documents in the order of the seed, then rows.

    Each row looks at one token more.
    """
    generator = np.random.RandomState(seed)
    order = np.arange(documents.size, dtype=np.int32)
    generator.shuffle(order)
    ends = np.cumsum(documents[order])
    num_rows = max(int(ends[-1]) - 1, 0) // seq_length
    if not num_rows:
        raise BalanceError(f"the documents have {ends[-1]} tokens: a row of --seq-length {seq_length} needs one more.")
    row_order = np.arange(num_rows, dtype=np.uint32)
    generator.shuffle(row_order)
    starts = row_order[:limit].astype(np.int64) * seq_length
    if not is_masked:
        return Rows.from_samples(np.full(starts.size, seq_length), row_tokens=seq_length)
    first, last = np.searchsorted(ends, starts, "right"), np.searchsorted(ends, starts + seq_length, "left")
    parts = [
        np.diff(np.unique(np.array([start, *ends[low:high], start + seq_length], dtype=np.int64)))
        for start, low, high in zip(starts.tolist(), first.tolist(), last.tolist(), strict=True)
    ]
    return Rows(np.concatenate(parts), np.array([part.size for part in parts]), seq_length)


def filled_rows(rows: Rows, *, seq_length: int, multiple: int) -> Rows:
    """Rows of SFTDataset, samples padded to a `multiple` of tokens (CP): what does not fit, or is behind it, is cut."""
    counts, padded = rows.counts, -(-rows.lengths // multiple) * multiple
    row_of, ends = np.repeat(np.arange(counts.size), counts), np.cumsum(padded)
    row_starts = np.concatenate([[0], ends])[np.cumsum(counts) - counts]
    starts = np.minimum(ends - padded - row_starts[row_of], seq_length)
    lengths = np.minimum(rows.lengths, seq_length - starts)
    fits = (lengths > 0) | (rows.lengths == 0)
    num_cut = int((np.bincount(row_of, rows.lengths, counts.size) > seq_length).sum())
    return Rows(lengths[fits], np.bincount(row_of[fits], minlength=counts.size), seq_length, num_cut)


def synthetic_lengths(name: str, *, num_samples: int, seed: int = 0) -> NDArray[np.int64]:
    """Draw lengths from a named distribution.

    Args:
        name: a key of `SYNTHETIC_LENGTHS`.
        num_samples: how many.
        seed: the same seed gives the same lengths, and a longer draw starts with the shorter one.

    Returns:
        `[num_samples]` int64, tokens.

    Raises:
        BalanceError: the name is unknown, or num_samples or seed cannot be used.

    Examples:
        >>> synthetic_lengths("gsm8k_sft", num_samples=1000).size
        1000
    """
    mixture = SYNTHETIC_LENGTHS.get(name)
    if mixture is None:
        raise BalanceError(f"No synthetic lengths are named {name!r}; there are {', '.join(SYNTHETIC_LENGTHS)}.")
    num_samples, seed = check_integer("num_samples", num_samples), check_integer("seed", seed, minimum=0)
    if num_samples > MAX_LENGTHS:
        raise BalanceError(f"num_samples is {num_samples}: at most {MAX_LENGTHS} samples are drawn.")
    generator = np.random.default_rng(seed)
    weights, mu, sigma = np.array(mixture["components"]).T
    upper = np.cumsum(weights)
    blocks, num_drawn = [np.zeros(0, dtype=np.int64)], 0
    while num_drawn < num_samples:
        # Scaled by the last edge: the weights are rounded and need not add to one.
        position = generator.random(_BLOCK) * upper[-1]
        component = (position[:, None] >= upper[:-1]).sum(axis=1)
        logarithm = mu[component] + sigma[component] * generator.standard_normal(_BLOCK)
        lengths = np.rint(np.exp(logarithm)).astype(np.int64)
        # Redrawn rather than clipped: clipping would pile samples up on the two edges.
        blocks.append(lengths[(lengths >= mixture["shortest"]) & (lengths <= mixture["longest"])])
        num_drawn += blocks[-1].size
    return np.concatenate(blocks)[:num_samples]
