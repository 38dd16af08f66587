"""Lengths of samples: read from files, drawn from named distributions, or joined and filled to Megatron's rows."""

from megatron_balance.lengths.read import MAX_LENGTH, dataset_lengths, file_of, read_lengths, read_rows, read_tokens
from megatron_balance.lengths.rows import (
    MEGATRON_SEED,
    STOCKS,
    SYNTHETIC_LENGTHS,
    Rows,
    filled_rows,
    joined_rows,
    synthetic_lengths,
)

__all__ = [
    "MAX_LENGTH",
    "MEGATRON_SEED",
    "STOCKS",
    "SYNTHETIC_LENGTHS",
    "Rows",
    "dataset_lengths",
    "file_of",
    "filled_rows",
    "joined_rows",
    "read_lengths",
    "read_rows",
    "read_tokens",
    "synthetic_lengths",
]
