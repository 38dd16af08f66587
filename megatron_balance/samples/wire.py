"""Layout of samples as bytes, which sender and receiver both compute from lengths and schema.

A block holds the samples that go from one rank to another. It has one region a key, in the schema's order, and a
region holds that key of all samples, one after the other. So a key costs one copy a block, however many samples there
are, and what is received is cut into views without a further copy. Regions start at multiples of 16 bytes: torch
refuses to view bytes as a wider dtype elsewhere, and kernels prefer it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron_balance.samples.sample import KeySpec, Sample, SampleSchema

ALIGNMENT_NBYTES = 16  # complex128 is the widest dtype


RaggedLengths = Sequence[Sequence[int]]
"""Entries of each ragged key of each sample, `[num_samples, num_ragged]`, keys in the schema's order."""


def _regions(
    schema: SampleSchema, *, num_tokens: int, num_samples: int, ragged_lengths: RaggedLengths
) -> Iterator[tuple[KeySpec, int, slice]]:
    """For each key: itself, its number of entries (of tokens, samples or its own) and its bytes within the block."""
    start = 0
    of_ragged = map(sum, zip(*ragged_lengths, strict=True))
    for key in schema.keys:
        num_entries = num_tokens if key.per_token else next(of_ragged) if key.ragged else num_samples
        stop = start + num_entries * key.nbytes
        yield key, num_entries, slice(start, stop)
        start = -(-stop // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES


def block_nbytes(schema: SampleSchema, *, lengths: Sequence[int], ragged_lengths: RaggedLengths = ()) -> int:
    """Bytes that samples of these lengths take; a multiple of the alignment.

    Args:
        schema: of the samples.
        lengths: tokens, `[num_samples]`.
        ragged_lengths: `[num_samples, num_ragged]`; left out where the schema has no ragged key.
    """
    if not lengths:
        return 0
    stop = 0
    for _, _, region in _regions(
        schema, num_tokens=sum(lengths), num_samples=len(lengths), ragged_lengths=ragged_lengths
    ):
        stop = region.stop
    return -(-stop // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES


@torch.no_grad()
def write_block(block: Tensor, *, samples: Sequence[Sample], schema: SampleSchema) -> None:
    """Write the samples into a block of bytes.

    Args:
        block: uint8 `[block_nbytes]`, on the samples' device.
        samples: in the order in which the receiver expects them.
        schema: fits all samples.
    """
    num_tokens = sum(sample.length for sample in samples)
    ragged_lengths = [sample.ragged_lengths for sample in samples]
    for key, num_entries, region in _regions(
        schema, num_tokens=num_tokens, num_samples=len(samples), ragged_lengths=ragged_lengths
    ):
        if region.start == region.stop:
            continue
        entries = block[region].view(key.dtype).view(num_entries, *key.shape)
        if key.per_token or key.ragged:
            parts = [(sample.per_token if key.per_token else sample.ragged)[key.name] for sample in samples]
            torch.cat(parts, out=entries)
        else:
            torch.stack([sample.per_sample[key.name] for sample in samples], out=entries)


def read_block(
    block: Tensor,
    *,
    lengths: Sequence[int],
    schema: SampleSchema,
    segment_lengths: Sequence[tuple[int, ...]] | None = None,
    ragged_lengths: RaggedLengths = (),
) -> list[Sample]:
    """The samples of a block, as views of it.

    Args:
        block: uint8 `[block_nbytes]`.
        lengths: tokens, `[num_samples]`, in the sender's order.
        schema: the sender's.
        segment_lengths: of each sample; None where every sample is one sequence.
        ragged_lengths: `[num_samples, num_ragged]`; left out where the schema has no ragged key.
    """
    lengths = list(lengths)
    per_token: list[dict[str, Tensor]] = [{} for _ in lengths]
    per_sample: list[dict[str, Tensor]] = [{} for _ in lengths]
    ragged: list[dict[str, Tensor]] = [{} for _ in lengths]
    of_ragged = zip(*ragged_lengths, strict=True)
    for key, num_entries, region in _regions(
        schema, num_tokens=sum(lengths), num_samples=len(lengths), ragged_lengths=ragged_lengths
    ):
        entries = block[region].view(key.dtype).view(num_entries, *key.shape)
        if key.ragged:
            pieces, of_kind = entries.split(list(next(of_ragged))), ragged
        elif key.per_token:
            pieces, of_kind = entries.split(lengths), per_token
        else:
            pieces, of_kind = entries.unbind(0), per_sample
        for values, piece in zip(of_kind, pieces, strict=True):
            values[key.name] = piece
    segments = [()] * len(lengths) if segment_lengths is None else segment_lengths
    return [
        Sample(tokens, per_sample=rest, ragged=own, segment_lengths=of_sample)
        for tokens, rest, own, of_sample in zip(per_token, per_sample, ragged, segments, strict=True)
    ]
