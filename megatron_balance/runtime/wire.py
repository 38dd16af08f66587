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

from megatron_balance.runtime.sample import KeySpec, Sample, SampleSchema

ALIGNMENT_NBYTES = 16  # complex128 is the widest dtype


def _regions(schema: SampleSchema, *, num_tokens: int, num_samples: int) -> Iterator[tuple[KeySpec, int, slice]]:
    """For each key: itself, its number of entries (of tokens or samples) and its bytes within the block."""
    start = 0
    for key in schema.keys:
        num_entries = num_tokens if key.per_token else num_samples
        stop = start + num_entries * key.nbytes
        yield key, num_entries, slice(start, stop)
        start = -(-stop // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES


def block_nbytes(schema: SampleSchema, *, lengths: Sequence[int]) -> int:
    """Bytes that samples of these lengths (tokens, `[num_samples]`) take; a multiple of the alignment."""
    if not lengths:
        return 0
    stop = 0
    for _, _, region in _regions(schema, num_tokens=sum(lengths), num_samples=len(lengths)):
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
    for key, num_entries, region in _regions(schema, num_tokens=num_tokens, num_samples=len(samples)):
        if region.start == region.stop:
            continue
        entries = block[region].view(key.dtype).view(num_entries, *key.shape)
        if key.per_token:
            torch.cat([sample.per_token[key.name] for sample in samples], out=entries)
        else:
            torch.stack([sample.per_sample[key.name] for sample in samples], out=entries)


def read_block(
    block: Tensor,
    *,
    lengths: Sequence[int],
    schema: SampleSchema,
    segment_lengths: Sequence[tuple[int, ...]] | None = None,
) -> list[Sample]:
    """The samples of a block, as views of it.

    Args:
        block: uint8 `[block_nbytes]`.
        lengths: tokens, `[num_samples]`, in the sender's order.
        schema: the sender's.
        segment_lengths: of each sample; None where every sample is one sequence.
    """
    lengths = list(lengths)
    per_token: list[dict[str, Tensor]] = [{} for _ in lengths]
    per_sample: list[dict[str, Tensor]] = [{} for _ in lengths]
    for key, num_entries, region in _regions(schema, num_tokens=sum(lengths), num_samples=len(lengths)):
        entries = block[region].view(key.dtype).view(num_entries, *key.shape)
        pieces = entries.split(lengths) if key.per_token else entries.unbind(0)
        for values, piece in zip(per_token if key.per_token else per_sample, pieces, strict=True):
            values[key.name] = piece
    segments = [()] * len(lengths) if segment_lengths is None else segment_lengths
    return [
        Sample(tokens, per_sample=rest, segment_lengths=of_sample)
        for tokens, rest, of_sample in zip(per_token, per_sample, segments, strict=True)
    ]
