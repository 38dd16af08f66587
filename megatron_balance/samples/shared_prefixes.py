"""Finds samples that begin with the same tokens by comparing hashes across ranks.

A chain names what a sample holds up to every 128th token, and up to its first trained label, where responses to one
prompt part: equal hashes mean equal tokens, labels and other keys. Where two samples train from other places, their
chains part at the first of them.

A hash is BLAKE2b's of the bytes of these tokens, of 64 bits: different samples collide once in 2**64 pairs. Who packs
samples compares them first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_balance.samples.sample import Samples

BLOCK_TOKENS = 128
"""Tokens between two hashes of a chain: so many, less one, are not shared although they are equal."""

SUMMED_KEY = "loss_mask"
"""What may differ between samples that share a token: it is computed once, with the sum of its weights."""

_PROMPT_END = b"prompt"
"""Hashed behind a prompt, so that what follows it in one sample and precedes its end in another is told apart."""


@dataclass(frozen=True, eq=False)
class HashChains:
    """What samples hold up to some of their tokens, sample after sample.

    Attributes:
        counts: int64 `[num_samples]`, hashes of each sample.
        ends: int64 `[counts.sum()]`, the tokens that each hash is of, ascending within a sample.
        hashes: uint64 `[counts.sum()]`.
    """

    counts: NDArray[np.int64]
    ends: NDArray[np.int64]
    hashes: NDArray[np.uint64]


def hash_chains(samples: Samples, *, block: int = BLOCK_TOKENS, with_mask: bool = False) -> HashChains:
    """The chains of a rank's samples: of all per-token keys but the loss mask, and of next tokens where no labels are.

    Args:
        samples: on the CPU.
        block: tokens between hashes.
        with_mask: hash the loss mask too, for samples of different weights.
    """
    names = [] if samples.schema is None else [key.name for key in samples.schema.keys if key.kind == "per_token"]
    columns = {name: _bytes(samples.columns[name]) for name in names}
    trained = np.zeros(samples.lengths.sum(), dtype=np.bool_)
    if SUMMED_KEY in columns:
        trained = columns[SUMMED_KEY].any(axis=1)
        if not with_mask:
            del columns[SUMMED_KEY]
    if "labels" not in columns and "tokens" in columns:
        columns["labels"] = next_tokens(columns["tokens"], lengths=samples.lengths)
    rows = np.hstack([columns[name] for name in sorted(columns)]) if columns else trained[:, None]
    return chains_of_rows(rows, lengths=samples.lengths, trained=trained, block=block)


def next_tokens(tokens: NDArray[Any], *, lengths: NDArray[np.int64]) -> NDArray[Any]:
    """Labels of samples one after another, `[num_tokens, ...]`; all bits set behind the last token of each."""
    labels = np.roll(tokens, -1, axis=0)
    labels[np.cumsum(lengths[lengths > 0]) - 1] = ~labels.dtype.type(0)
    return labels


def chains_of_rows(
    rows: NDArray[Any], *, lengths: NDArray[np.int64], trained: NDArray[np.bool_], block: int
) -> HashChains:
    """The chains of samples, by `[num_tokens, ...]` of what must be equal, and whether each token is trained."""
    starts, trained_at = np.cumsum(lengths) - lengths, np.append(np.flatnonzero(trained), trained.size)
    prompts = trained_at[np.searchsorted(trained_at, starts)] - starts
    counts, ends, hashes = list[int](), list[int](), bytearray()
    for start, length, prompt in zip(starts.tolist(), lengths.tolist(), prompts.tolist(), strict=True):
        places = {*range(block, length + 1, block), *([prompt] if 0 < prompt < length else [])}
        hasher = hashlib.blake2b(digest_size=8)
        for before, place in pairwise([0, *sorted(places)]):
            hasher.update(rows[start + before : start + place].tobytes())
            hashes += hasher.digest()
            ends.append(place)
            if place == prompt:
                hasher.update(_PROMPT_END)
        counts.append(len(places))
    return HashChains(np.array(counts, np.int64), np.array(ends, np.int64), np.frombuffer(hashes, np.uint64))


def _bytes(column: Sequence[Tensor]) -> NDArray[np.uint8]:
    """`[num_tokens, nbytes]`: the entries of a key."""
    import torch  # here: a list of token ids needs numpy alone

    values = torch.cat([*column])
    return values.reshape(len(values), -1).view(torch.uint8).numpy()
