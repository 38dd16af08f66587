"""A cap from memory and padded shapes in real `pretrain()` runs: the cap holds, and the loss stays what it was."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from forked_runs import train
from rounding import assert_equal
from training_run import Recorded

NUM_STEPS = 4
SEQ_LENGTH = 1024
BUCKET = 96  # no multiple of the 128 tokens that a cap is rounded to

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64 "
    f"--seq-length {SEQ_LENGTH} --max-position-embeddings {SEQ_LENGTH} --global-batch-size 16 "
    f"--train-iters {NUM_STEPS}"
)
BALANCED = "--use-dynamic-batch-size --balance-data --balance-by-flops --max-tokens-per-gpu"
BUDGET = "--balance-memory-gib 0.012"


def run(folder: Path, *flags: str, num_ranks: int = 2) -> Recorded:
    return train(folder, " ".join((FLAGS, *flags)).split(), num_ranks=num_ranks)


def shapes(recorded: Recorded) -> list[int]:
    """Tokens of every micro-batch that every rank ran."""
    return [tokens for steps in recorded.ranks for step in steps for tokens in step["microbatch_tokens"]]


def unfilled(recorded: Recorded) -> list[int]:
    """Tokens of the planned micro-batches before they are filled up."""
    steps = next(steps for steps in recorded.ranks if "ranks" in steps[0])
    return [
        sum(step["lengths"][sample] for sample in slot) for step in steps for slots in step["ranks"] for slot in slots
    ]


def test_a_cap_from_memory_holds_on_every_rank_and_buckets_leave_few_shapes(tmp_path: Path) -> None:
    stock = run(tmp_path / "stock")
    ours = run(tmp_path / "ours", BALANCED, "auto", BUDGET, f"--balance-shape-bucket {BUCKET}")
    assert_equal(ours, reference=stock)
    (said,) = re.findall(r"--max-tokens-per-gpu auto is (\d+) tokens: 0.0 GiB of memory", ours.output)
    cap = int(said)
    assert cap % BUCKET == 0
    assert SEQ_LENGTH < cap < 16 * SEQ_LENGTH / 2  # what fits decided, not the batch
    # Every micro-batch of every rank: below the cap, and not far below, or the cap would have shown nothing.
    assert cap - SEQ_LENGTH < max(shapes(ours)) <= cap
    assert {tokens % BUCKET for tokens in shapes(ours)} == {0}
    assert len(set(shapes(ours))) < len(set(unfilled(ours)))


@pytest.mark.parametrize(
    ("parallel", "num_ranks", "multiple"),
    [
        pytest.param("--context-parallel-size 2", 4, 2 * BUCKET, id="CP2"),
        pytest.param(
            "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
            4,
            BUCKET,
            id="PP2-TP2-SP",
        ),
    ],
)
def test_buckets_change_no_loss(tmp_path: Path, parallel: str, num_ranks: int, multiple: int) -> None:
    stock = run(tmp_path / "stock", parallel, num_ranks=num_ranks)
    flags = f"{SEQ_LENGTH + BUCKET} --balance-shape-bucket {BUCKET}"
    ours = run(tmp_path / "ours", parallel, BALANCED, flags, num_ranks=num_ranks)
    assert {tokens % multiple for tokens in shapes(ours)} == {0}
    assert_equal(ours, reference=stock)
