"""Samples: their tensors and schema, their bytes, and the rows and micro-batches that hold them."""

from megatron_balance.samples.packing import (
    pack_microbatch,
    padding_mask,
    with_attention_keys,
)
from megatron_balance.samples.sample import KeySpec, Sample, SampleSchema
from megatron_balance.samples.unpacking import split_packed, with_cu_seqlens, with_row_lengths

__all__ = [
    "KeySpec",
    "Sample",
    "SampleSchema",
    "pack_microbatch",
    "padding_mask",
    "split_packed",
    "with_attention_keys",
    "with_cu_seqlens",
    "with_row_lengths",
]
