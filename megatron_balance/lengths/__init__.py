"""Lengths of samples: read from files, or drawn from named distributions."""

from megatron_balance.lengths.read import MAX_LENGTH, read_lengths
from megatron_balance.lengths.synthetic import SYNTHETIC_LENGTHS, synthetic_lengths

__all__ = ["MAX_LENGTH", "SYNTHETIC_LENGTHS", "read_lengths", "synthetic_lengths"]
