"""Lengths of samples: read from files, drawn from named distributions, or joined and filled to Megatron's rows."""

from megatron_balance.lengths.read import MAX_LENGTH, MAX_LENGTHS, Rows, read_lengths, read_rows
from megatron_balance.lengths.stock import MEGATRON_SEED, STOCKS, StockRows, stock_rows
from megatron_balance.lengths.synthetic import SYNTHETIC_LENGTHS, synthetic_lengths

__all__ = [
    "MAX_LENGTH",
    "MAX_LENGTHS",
    "MEGATRON_SEED",
    "STOCKS",
    "SYNTHETIC_LENGTHS",
    "Rows",
    "StockRows",
    "read_lengths",
    "read_rows",
    "stock_rows",
    "synthetic_lengths",
]
