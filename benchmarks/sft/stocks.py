"""What `compare` predicts over each kind of stock, and what training gains: documents, padded rows and packed rows.

Seconds of micro-batches are fitted to the first balanced run of a kind; with them `compare` predicts all runs from the
lengths in the data alone. Measured is what `compare` predicts, at most: CPU seconds that the slowest rank's training
thread spends in forward and backward passes. Planning and exchange have threads of their own, and the optimizer is the
same in both runs. Both figures are of the same steps, those after the warm-up: steps differ in what they gain. The
seconds of a step on a rank are the median of all runs, so that what disturbs one run moves none of them.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from training_run import Recorded

from benchmarks.publish import say
from benchmarks.sft.speed import NUM_RANKS, SEQ_LENGTH, WARM_UP_STEPS, model_flags
from megatron_balance.cli import main

NUM_RUNS = 5
NUM_STEPS = 10
GLOBAL_BATCH_SIZE = 8
SEED = 5

MODEL_FLAGS = model_flags(global_batch_size=GLOBAL_BATCH_SIZE, num_steps=NUM_STEPS, seed=SEED)
# Without dynamic sizes, which two ranks hardly need.
BALANCED = f"--use-dynamic-batch-size --max-tokens-per-gpu {SEQ_LENGTH} --balance-data --balance-by-flops"

KINDS: dict[str, Sequence[int]] = {"masked-documents": (1,), "padded": (1,), "packed": (1, 3, 2)}
"""Kind of stock → conversations of its rows, in turn."""

Runner = Callable[[str, Sequence[str]], Recorded]
"""Trains on a kind of data with these flags beside those of the data."""


def measure_stocks(run: Runner, *, lengths: Callable[[str], str], folder: Path) -> dict[str, dict[str, float]]:
    """Gains by kind: the predicted one, the measured one, its distance to the prediction, and those of single runs."""
    return {kind: _gains(kind, run=run, lengths=lengths(kind), folder=folder / kind) for kind in KINDS}


def _gains(kind: str, *, run: Runner, lengths: str, folder: Path) -> dict[str, Any]:
    record, seconds = folder / "record", folder / "seconds.json"
    balanced: list[Recorded] = []
    stock: list[Recorded] = []
    for number in range(NUM_RUNS):
        keeps = ["--balance-record", str(record)] if number == 0 else []
        balanced.append(run(kind, [*MODEL_FLAGS.split(), *BALANCED.split(), *keeps]))
        stock.append(run(kind, MODEL_FLAGS.split()))
    flags = [f"--data {kind} --seq-length {SEQ_LENGTH} --global-batch-size {GLOBAL_BATCH_SIZE} --dp-size {NUM_RANKS}"]
    flags += [f"--cost {seconds} --policy calibrated", f"--shuffle {SEED}" if kind == "masked-documents" else ""]
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["fit", str(record), "--out", str(seconds)]) == 0
        whole, warm_up = (
            _predicted(lengths, " ".join(flags).split(), num_steps=count) for count in (NUM_STEPS, WARM_UP_STEPS)
        )
    stock_seconds, balanced_seconds = (whole - warm_up).tolist()
    predicted, measured = stock_seconds / balanced_seconds, _passes(stock) / _passes(balanced)
    gains = [_passes([before]) / _passes([after]) for before, after in zip(stock, balanced, strict=True)]
    singly = ", ".join(f"{gain:.3f}" for gain in gains)
    say(f"{kind}: predicted {predicted:.3f}, measured {measured:.3f}, single runs {singly}")
    return {"predicted": predicted, "measured": measured, "below": 1 - measured / predicted, "runs": gains}


def _predicted(lengths: str, flags: Sequence[str], *, num_steps: int) -> NDArray[np.float64]:
    """Seconds that `compare` predicts for the first steps of an epoch: stock, and balanced by the fitted seconds."""
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as out:
        assert main(["compare", lengths, *flags, "--steps", str(num_steps), "--json", out.name]) == 0
        lines = [json.loads(line) for line in Path(out.name).read_text().splitlines()]
    seconds = {line["name"]: line["seconds_per_step"] * num_steps for line in lines if line["kind"] == "policy"}
    return np.array([seconds["stock"], seconds["calibrated"]])


def _passes(runs: Sequence[Recorded]) -> float:
    """CPU seconds of the slowest rank's passes in the steps after the warm-up, each the median of all runs."""
    passes = [[[step["passes_cpu_seconds"] for step in rank[WARM_UP_STEPS:]] for rank in run.ranks] for run in runs]
    return float(np.median(passes, axis=0).max(axis=0).sum())
