"""Writes data sets of random tokens for pretrain_sft."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

VOCAB_SIZE = 257
"""`--vocab-size` of the quickstart's model."""


def write_rows(path: Path, *, lengths: ArrayLike, seed: int, first_tokens: Iterable[int] | None = None) -> Path:
    """Write a jsonl file with one row for each length."""
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, VOCAB_SIZE, length + 1).tolist() for length in np.asarray(lengths)]  # the last is a label
    if first_tokens is not None:
        for row, first in zip(rows, first_tokens, strict=True):
            row[0] = first
    path.write_text("".join(f"{json.dumps({'tokens': row})}\n" for row in rows))
    return path
