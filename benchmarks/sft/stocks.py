"""What `compare` predicts over each kind of stock, and what training gains: documents, padded rows and packed rows.

Seconds of micro-batches are fitted to the first balanced run of a kind; with them `compare` predicts all runs from the
lengths in the data alone. Measured is what `compare` predicts, at most: CPU seconds that the slowest rank's training
thread spends in forward and backward passes. Planning and exchange have threads of their own, and the optimizer is the
same in both runs.
"""

from __future__ import annotations

import contextlib
import io
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from training_run import Recorded

from megatron_balance.cli import main

NUM_RUNS = 5
NUM_RANKS = 2
NUM_STEPS = 5
SEQ_LENGTH = 4096
GLOBAL_BATCH_SIZE = 8
SEED = 5

MODEL_FLAGS = (
    "--num-layers 2 --hidden-size 128 --kv-channels 32 --num-attention-heads 4 --num-query-groups 2 "
    f"--ffn-hidden-size 384 --seq-length {SEQ_LENGTH} --max-position-embeddings {SEQ_LENGTH} --split 100,0,0 "
    f"--global-batch-size {GLOBAL_BATCH_SIZE} --train-iters {NUM_STEPS} --seed {SEED} --vocab-size 258"
)
# Without dynamic sizes, which two ranks hardly need.
BALANCED = f"--use-dynamic-batch-size --max-tokens-per-gpu {SEQ_LENGTH} --balance-data --balance-by-flops"

KINDS: dict[str, Sequence[int]] = {"masked-documents": (1,), "padded": (1,), "packed": (1, 3, 2)}
"""Kind of stock → conversations of its rows, in turn."""

Runner = Callable[[str, Sequence[str]], Recorded]
"""Trains on a kind of data with these flags beside those of the data."""


def measure_stocks(run: Runner, *, lengths: Callable[[str], str], folder: Path) -> dict[str, dict[str, float]]:
    """Gains by kind: the predicted one, the median of all runs, and its distance to the prediction."""
    return {kind: _gains(kind, run=run, lengths=lengths(kind), folder=folder / kind) for kind in KINDS}


def _gains(kind: str, *, run: Runner, lengths: str, folder: Path) -> dict[str, Any]:
    gains: list[float] = []
    record, seconds, out = folder / "record", folder / "seconds.json", folder / "compare.jsonl"
    for number in range(NUM_RUNS):
        keeps = ["--balance-record", str(record)] if number == 0 else []
        balanced = run(kind, [*MODEL_FLAGS.split(), *BALANCED.split(), *keeps])
        stock = run(kind, MODEL_FLAGS.split())
        gains.append(_passes(stock) / _passes(balanced))
    with contextlib.redirect_stdout(io.StringIO()):
        fitted = main(["fit", str(record), "--out", str(seconds)])
        flags = (
            f"--data {kind} --seq-length {SEQ_LENGTH} --global-batch-size {GLOBAL_BATCH_SIZE} --dp-size {NUM_RANKS} "
        )
        flags += f"--steps {NUM_STEPS} --cost {seconds} --policy calibrated --json {out}"
        shuffle = ["--shuffle", str(SEED)] if kind == "masked-documents" else []
        compared = main(["compare", lengths, *flags.split(), *shuffle])
    assert (fitted, compared) == (0, 0)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    predicted = next(line["speedup"] for line in lines if line.get("name") == "calibrated")
    measured = statistics.median(gains)
    sys.stdout.write(
        f"{kind}: predicted {predicted:.3f}, measured {measured:.3f} of {[round(gain, 3) for gain in gains]}\n"
    )
    sys.stdout.flush()
    return {"predicted": predicted, "measured": measured, "below": 1 - measured / predicted, "runs": gains}


def _passes(run: Recorded) -> float:
    """CPU seconds of the slowest rank's passes, the mean of all steps but the first, which pays for allocations."""
    steps = list(zip(*run.ranks, strict=True))[1:]
    return statistics.mean(max(rank["passes_cpu_seconds"] for rank in ranks) for ranks in steps)
