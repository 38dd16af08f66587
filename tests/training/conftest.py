"""The runs and the data that all tests of this folder share, and the marks that keep a layout on one worker."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from kept_runs import KeptRuns
from table import SEQ_LENGTH

pytest.register_assert_rewrite("steps")

TRAINED = range(1, 65)
VALIDATION_SETS = {"valid": range(100, 124), "odd": range(130, 141)}
"""First tokens of the samples, by which tests know them."""


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory) -> KeptRuns:
    """Makes a run, or finds it made; workers of pytest-xdist share the folder above their own."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if base.name.startswith("popen-") else base) / "kept-runs"
    data = base / "data"
    data.mkdir()
    write_rows(data / "train.jsonl", TRAINED, seed=1)
    for seed, (name, firsts) in enumerate(VALIDATION_SETS.items()):
        write_rows(data / f"{name}.jsonl", firsts, seed=seed + 2)
    return KeptRuns(folder, data=data)


def write_rows(path: Path, first_tokens: Sequence[int], *, seed: int) -> None:
    """A jsonl file of random tokens, most rows short and some as long as may be; a third of each is not learned."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(4, 1.1, len(first_tokens)).astype(int), 8, SEQ_LENGTH)
    with path.open("w") as out:
        for first, length in zip(first_tokens, lengths.tolist(), strict=True):
            tokens = [first, *rng.integers(1, 257, length).tolist()]  # the last is a label only; 0 pads
            learned = [0] * (length // 3) + [1] * (length + 1 - length // 3)
            out.write(json.dumps({"tokens": tokens, "loss_mask": learned}) + "\n")
