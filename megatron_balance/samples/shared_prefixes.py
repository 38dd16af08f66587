"""Finds samples that begin with the same tokens by comparing hashes across ranks.

A chain names what a sample holds up to every 128th token, and up to its first trained label, where responses to one
prompt part: equal hashes mean equal tokens, labels and other keys. Where two samples train from other places, their
chains part at the first of them.

A hash is the sum over tokens of `mixed(words of the token) * multiplier of its place`, mixed with the number of tokens:
integers modulo 2**64, the same on every machine. Different samples collide once in 2**64 pairs, unless someone wants
them to; who packs samples compares them first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_balance.samples.sample import Samples

BLOCK_TOKENS = 128
"""Tokens between two hashes of a chain: so many, less one, are not shared although they are equal."""

SUMMED_KEY = "loss_mask"
"""What may differ between samples that share a token: it is computed once, with the sum of its weights."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio

Words = NDArray[np.uint64]


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
    hashes: Words


def hash_chains(samples: Samples, *, block: int = BLOCK_TOKENS, with_mask: bool = False) -> HashChains:
    """The chains of a rank's samples: of all per-token keys but the loss mask, and of next tokens where no labels are.

    Args:
        samples: on the CPU.
        block: tokens between hashes.
        with_mask: hash the loss mask too, for samples of different weights.
    """
    names = [] if samples.schema is None else [key.name for key in samples.schema.keys if key.kind == "per_token"]
    columns = {name: _integers(samples.columns[name]) for name in names}
    trained = np.zeros(samples.lengths.sum(), dtype=np.bool_)
    if SUMMED_KEY in columns:
        trained = columns[SUMMED_KEY].any(axis=1)
        if not with_mask:
            del columns[SUMMED_KEY]
    if "labels" not in columns and "tokens" in columns:
        columns["labels"] = next_tokens(columns["tokens"], lengths=samples.lengths)
    words = [word for name in sorted(columns) for word in columns[name].T]
    return chains_of_words(words, lengths=samples.lengths, trained=trained, block=block)


def next_tokens(tokens: NDArray[np.integer], *, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Labels of samples one after another, `[num_tokens, ...]`; -1 behind the last token of each."""
    labels = np.append(tokens[1:], tokens[:1], axis=0).astype(np.int64)
    labels[np.cumsum(lengths[lengths > 0]) - 1] = -1
    return labels


def chains_of_words(
    words: Sequence[NDArray[np.integer]], *, lengths: NDArray[np.int64], trained: NDArray[np.bool_], block: int
) -> HashChains:
    """The chains of samples, by arrays `[num_tokens]` of what must be equal, and whether each token is trained."""
    starts, stops = np.cumsum(lengths) - lengths, np.cumsum(lengths)
    total = np.zeros(trained.size, dtype=np.uint64)
    for word, multiplier in zip(words, _multipliers(len(words), seed=1), strict=True):
        total += word.astype(np.uint64) * multiplier
    of_places = _multipliers(int(lengths.max(initial=0)), seed=2)
    total = _mixed(total)
    total *= np.concatenate([of_places[:0], *(of_places[:length] for length in lengths.tolist())])
    sums = np.append(np.uint64(0), np.cumsum(total, dtype=np.uint64))

    trained_at = np.append(np.flatnonzero(trained), trained.size)
    prompts = trained_at[np.searchsorted(trained_at, starts)] - starts
    prompts[(prompts >= lengths) | (prompts % block == 0)] = 0
    whole_blocks = [np.arange(start + block, stop + 1, block) for start, stop in zip(starts, stops, strict=True)]
    places = np.unique(np.concatenate([(starts + prompts)[prompts > 0], *whole_blocks]))
    samples = np.searchsorted(stops, places)
    ends = places - starts[samples]
    hashes = _mixed(sums[places] - sums[starts[samples]] + _mixed(ends.astype(np.uint64)))
    # Behind a prompt's end hashes say where it was: no hash has two others before it.
    parted = np.where(ends > prompts[samples], prompts[samples], 0)
    hashes = _mixed(hashes + parted.astype(np.uint64))
    return HashChains(np.bincount(samples, minlength=lengths.size), ends, hashes)


def _integers(column: Sequence[Tensor]) -> NDArray[np.integer]:
    """`[num_tokens, words]`: the bits of the entries of a key."""
    import torch  # here: a list of token ids needs numpy alone

    values = torch.cat([*column])
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32}.get(values.dtype.itemsize, torch.int64)
    return values.reshape(len(values), -1).view(width).numpy()


def _mixed(words: Words) -> Words:
    """A permutation of the integers in which every bit reaches every other."""
    for _ in range(2):
        words = (words ^ (words >> np.uint64(32))) * _GOLDEN
    return words ^ (words >> np.uint64(32))


def _multipliers(count: int, *, seed: int) -> Words:
    """Odd numbers, so that none maps two words to one."""
    return _mixed(np.arange(count, dtype=np.uint64) + np.uint64(seed << 48)) | np.uint64(1)
