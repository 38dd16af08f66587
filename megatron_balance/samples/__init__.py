"""Samples: their tensors and schema, their bytes, and the rows and micro-batches that hold them."""

from megatron_balance.samples.attention_keys import with_attention_keys, with_cu_seqlens
from megatron_balance.samples.packing import dummy_microbatch, pack_microbatch
from megatron_balance.samples.padded_rows import with_row_lengths
from megatron_balance.samples.padding import padding_mask, sequence_lengths
from megatron_balance.samples.sample import KeySpec, Sample, SampleSchema
from megatron_balance.samples.unpacking import split_packed
from megatron_balance.samples.wire import block_nbytes, read_block, write_block

__all__ = [
    "KeySpec",
    "Sample",
    "SampleSchema",
    "block_nbytes",
    "dummy_microbatch",
    "pack_microbatch",
    "padding_mask",
    "read_block",
    "sequence_lengths",
    "split_packed",
    "with_attention_keys",
    "with_cu_seqlens",
    "with_row_lengths",
    "write_block",
]
