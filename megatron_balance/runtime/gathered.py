"""The lengths of all ranks' samples, read from the values that each of them sent.

The values of a rank are the lengths of its samples. Where any of them has several sequences, they are the number of
sequences of each sample and then the lengths of all sequences: more values than samples, which distinguishes the two.
Where samples have ragged keys, the entries of each of these keys follow, and where images count, the sums of their
patches, sample after sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_balance.samples.sample import SampleSchema

INLINE_LENGTHS = 115
"""Values of a rank that the first gather of a run has room for: with its header they fill 1 KiB."""


@dataclass(frozen=True, eq=False)
class GatheredLengths:
    """The samples of all ranks; a sample's id is its index here.

    Attributes:
        lengths: int64 `[num_samples]`, tokens (`original_seq_len`), in the order (rank, local index).
        home_ranks: int64 `[num_samples]`, the rank in the group that loaded the sample.
        num_samples_per_rank: int64 `[dp_size]`.
        offset: id of this rank's first sample.
        schema: of all samples; None where no rank has any.
        num_segments: int64 `[num_samples]`, sequences of each sample, at least 1.
        segment_lengths: int64 `[sum of num_segments]`, tokens of each sequence, sample after sample.
        new_source: True if some rank's samples come from another source than its last ones.
        next_row_values: `row_values` for a next gather of about as many samples; the same on every rank.
        reported: int64 `[dp_size, NUM_REPORTED]`, the numbers that each rank sent along.
        ragged_lengths: int64 `[num_samples, num_ragged]`, entries of each ragged key, in the schema's order; None where
            it has none.
        image_patches: int64 `[num_samples, 2]`, as `image_patches` counts them; None where no rank did.
    """

    lengths: NDArray[np.int64]
    home_ranks: NDArray[np.int64]
    num_samples_per_rank: NDArray[np.int64]
    offset: int
    schema: SampleSchema | None
    num_segments: NDArray[np.int64]
    segment_lengths: NDArray[np.int64]
    new_source: bool = False
    next_row_values: int = INLINE_LENGTHS
    reported: NDArray[np.int64] | None = None
    ragged_lengths: NDArray[np.int64] | None = None
    image_patches: NDArray[np.int64] | None = None

    def ragged_of(self, sample_ids: NDArray[np.int64]) -> list[list[int]]:
        """Entries of the ragged keys of each of these samples; empty where there is no such key."""
        return [] if self.ragged_lengths is None else self.ragged_lengths[sample_ids].tolist()

    def segments_of(self, sample_ids: NDArray[np.int64]) -> list[tuple[int, ...]] | None:
        """Lengths of the sequences of each of these samples; None where every sample of all ranks is one sequence."""
        if self.segment_lengths.size == self.lengths.size:
            return None
        stops = np.cumsum(self.num_segments)[sample_ids]
        starts = stops - self.num_segments[sample_ids]
        return [tuple(self.segment_lengths[start:stop].tolist()) for start, stop in zip(starts, stops, strict=True)]


def read_values(
    padded: NDArray[np.int64], *, num_values: NDArray[np.int64], num_samples: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Values of all ranks `[group_size, n]` → number of sequences of each sample, and lengths of all sequences."""
    if (num_values == num_samples).all():
        flat = padded[np.arange(padded.shape[1]) < num_values[:, None]]
        return np.ones_like(flat), flat
    counts: list[NDArray[np.int64]] = []
    lengths: list[NDArray[np.int64]] = []
    for row, stop, num in zip(padded, num_values.tolist(), num_samples.tolist(), strict=True):
        several = stop > num
        counts.append(row[:num] if several else np.ones(num, dtype=np.int64))
        lengths.append(row[num if several else 0 : stop])
    return np.concatenate(counts), np.concatenate(lengths)


def read_columns(
    padded: NDArray[np.int64], *, num_values: NDArray[np.int64], num_samples: NDArray[np.int64], num_columns: int
) -> NDArray[np.int64]:
    """Values of all ranks → each sample's values beside lengths, `[num_samples, num_columns]`: a rank's last ones."""
    last = (num_samples * num_columns).tolist()
    parts = [row[stop - num : stop] for row, stop, num in zip(padded, num_values.tolist(), last, strict=True)]
    return np.concatenate(parts).reshape(int(num_samples.sum()), num_columns)
