"""Makes the data: as many rows of the built-in corpus as a run trains on, no two of one length, in any order.

A row is known by its length, so that a plan's lengths tell which rows a step took. SftDataset shuffles a file; the
rows lie in it so that the shuffle yields the order that is wanted. Megatron then reads them as any other data.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sft_dataset import SftDataset, SftSample, builtin_samples

from benchmarks.equality.cases import GLOBAL_BATCH_SIZE, NUM_STEPS, SEED, SEQ_LENGTH

NUM_ROWS = NUM_STEPS * GLOBAL_BATCH_SIZE


def rows_of_distinct_lengths() -> list[SftSample]:
    """`[NUM_ROWS]` samples, drawn from the corpus; the first of a length stays. At most one is cut at SEQ_LENGTH."""
    samples = list(builtin_samples())
    rows: dict[int, SftSample] = {}
    for index in np.random.default_rng(SEED).permutation(len(samples)):
        sample = samples[index]
        if sample.learned[1 : SEQ_LENGTH + 1].any():
            rows.setdefault(_length(sample), sample)
        if len(rows) == NUM_ROWS:
            return list(rows.values())
    raise AssertionError(f"the corpus has {len(rows)} lengths up to {SEQ_LENGTH}, and {NUM_ROWS} are needed")


def shuffled_within_steps() -> list[int]:
    """Row numbers; every global batch holds the rows it held, in another order."""
    rng = np.random.default_rng(SEED + 1)
    steps = np.arange(NUM_ROWS).reshape(NUM_STEPS, GLOBAL_BATCH_SIZE)
    return [int(row) for step in steps for row in rng.permutation(step)]


def write_rows(path: Path, rows: Sequence[SftSample], *, order: Sequence[int]) -> None:
    """Write a jsonl file that training reads in this order."""
    data: Any = [rows[number] for number in order]
    numbered = {id(sample): position for position, sample in enumerate(data)}
    dataset = SftDataset(
        data, num_samples=len(data), seq_length=SEQ_LENGTH, pad_to_seq_length=False, pad_token=0, seed=SEED
    )
    lines: list[str] = [""] * len(data)
    for index in range(len(data)):
        sample = data[index]
        text = {"tokens": sample.tokens.tolist(), "loss_mask": sample.learned.astype(int).tolist()}
        lines[numbered[id(dataset.sample(index))]] = json.dumps(text)
    path.write_text("".join(line + "\n" for line in lines))


def _length(sample: SftSample) -> int:
    return min(sample.tokens.size - 1, SEQ_LENGTH)
