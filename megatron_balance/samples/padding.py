"""Padding mask of a packed micro-batch, from the lengths of its sequences alone.

`pack_microbatch` pads each sequence to a multiple of `token_multiple` tokens and puts filler behind the last one. Ranks
that read no data get the lengths from their model replica, and make the same mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_balance.samples.sample import Sample


def sequence_lengths(samples: Sequence[Sample]) -> list[int]:
    """Lengths of the sequences of a micro-batch, tokens, in its order: without padding, filler and empty sequences."""
    return [length for sample in samples for length in sample.segment_lengths if length]


def padding_mask(
    lengths: Sequence[int], *, num_tokens: int, token_multiple: int = 1, cp_size: int = 1, cp_rank: int = 0
) -> NDArray[np.bool_]:
    """True where a token is padding, for the tokens of a context-parallel rank.

    Args:
        lengths: `sequence_lengths` of the micro-batch; none for a dummy.
        num_tokens: of the micro-batch, padding included.
        token_multiple: as the micro-batch was packed.
        cp_size: context-parallel ranks.
        cp_rank: this one; it holds the chunks cp_rank and 2*cp_size-1-cp_rank of each sequence.

    Returns:
        `[num_tokens / cp_size]`.
    """
    real = np.asarray(lengths, dtype=np.int64).reshape(-1, 1)
    padded = -(-real // token_multiple) * token_multiple
    num_chunks, mine = (1, [0]) if cp_size == 1 else (2 * cp_size, [cp_rank, 2 * cp_size - 1 - cp_rank])
    chunk = padded // num_chunks
    real_of_chunk = np.clip(real - chunk * np.array(mine), 0, chunk)  # [num_sequences, chunks of this rank]
    runs = np.stack([real_of_chunk, chunk - real_of_chunk], axis=-1).ravel()
    filler = num_tokens // cp_size - int(runs.sum())
    assert filler >= 0, f"{len(lengths)} sequences need {int(padded.sum())} tokens, and there are {num_tokens}"
    is_padding = np.tile([False, True], runs.size // 2)
    return np.append(np.repeat(is_padding, runs), np.ones(filler, dtype=np.bool_))
