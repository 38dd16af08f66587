"""Speed of Megatron's `--sft` on two data-parallel ranks: stock, without its padding, and balanced.

Stock `--sft` fills every row up to `--seq-length` and computes the filling. `--use-dynamic-batch-size` packs the rows
without it; `--balance-data` and `--balance-by-flops` then even out the ranks. So the table has a row for each flag, and
each factor is that flag's own. One conversation a row, the whole built-in corpus.

Invariant: every run trains on the same samples from the same weights, and its losses are stock's within rounding.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from training_run import Recorded, largest_difference

NUM_RANKS = 2
SEQ_LENGTH = 4096
NUM_STEPS = 14
WARM_UP_STEPS = 2
"""The first steps pay for allocations."""


def model_flags(*, global_batch_size: int, num_steps: int, seed: int) -> str:
    return (
        "--num-layers 2 --hidden-size 128 --kv-channels 32 --num-attention-heads 4 --num-query-groups 2 "
        f"--ffn-hidden-size 384 --seq-length {SEQ_LENGTH} --max-position-embeddings {SEQ_LENGTH} "
        f"--split 100,0,0 --vocab-size 258 --global-batch-size {global_batch_size} --train-iters {num_steps} "
        f"--seed {seed}"
    )


_PACKED = f"--use-dynamic-batch-size --max-tokens-per-gpu {SEQ_LENGTH}"
POLICIES = {
    "stock": "",
    "without padding": _PACKED,
    "+ `--balance-data`": f"{_PACKED} --balance-data",
    "+ `--balance-by-flops`": f"{_PACKED} --balance-data --balance-by-flops",
}
"""Name → balance flags, each policy one flag more than the one before."""

Runner = Callable[[Sequence[str]], Recorded]
"""Trains with these flags beside those of the checkout's data."""


def measure_speed(run: Runner) -> dict[str, dict[str, float]]:
    flags_of_model = model_flags(global_batch_size=24, num_steps=NUM_STEPS, seed=5)
    runs = {name: run([*flags_of_model.split(), *flags.split()]) for name, flags in POLICIES.items()}
    return {name: _figures(recorded, stock=runs["stock"]) for name, recorded in runs.items()}


def _figures(run: Recorded, *, stock: Recorded) -> dict[str, float]:
    steps = [list(step_rows) for step_rows in zip(*run.ranks, strict=True)][WARM_UP_STEPS:]
    return {
        "cpu_seconds": statistics.mean(max(rank["cpu_seconds"] for rank in ranks) for ranks in steps),
        "seconds": statistics.mean(max(rank["seconds"] for rank in ranks) for ranks in steps),
        "loss_difference": largest_difference(run, reference=stock, key="lm_loss"),
    }
