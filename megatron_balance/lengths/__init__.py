"""Lengths of samples: read from files, or drawn from named distributions."""

from __future__ import annotations

from megatron_balance.lengths.read import MAX_LENGTH, SYNTHETIC_LENGTHS, read_lengths, synthetic_lengths

__all__ = ["MAX_LENGTH", "SYNTHETIC_LENGTHS", "read_lengths", "synthetic_lengths"]
