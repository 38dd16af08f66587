"""Runs the two long trainings of a soak: balanced with everything on, and stock, which shows Megatron's own growth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from training_run import ROOT, train

from benchmarks.soak import GLOBAL_BATCH_SIZE

NUM_RANKS = 2
MODEL = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64 "
    "--seq-length 512 --max-position-embeddings 512 --log-interval 10 "
    f"--global-batch-size {GLOBAL_BATCH_SIZE}"
)
BALANCED = "--use-dynamic-batch-size --max-tokens-per-gpu 512 --balance-data --balance-by-flops"
"""The record is on as well; its folder is added."""


def soak(folder: Path, *, balanced: bool, num_steps: int, sample_steps: int) -> list[list[dict[str, Any]]]:
    flags = [*MODEL.split(), "--train-iters", str(num_steps)]
    if balanced:
        flags += [*BALANCED.split(), "--balance-record", str(folder / "record")]
    return train(
        folder,
        flags,
        num_ranks=NUM_RANKS,
        script=ROOT / "benchmarks" / "soak" / "sampled.py",
        environment={"SOAK_SAMPLE_STEPS": str(sample_steps)},
        timeout_seconds=600 + 3 * num_steps,
    ).ranks
