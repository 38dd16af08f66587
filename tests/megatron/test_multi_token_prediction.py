"""Multi-token prediction in balanced packs: labels stay within their sequences, and losses weigh what they weigh in
stock runs.

Megatron weighs this loss by the learned tokens of a micro-batch over those that are left when labels and mask have
moved by one, which drops a sequence's first token. Where that is not learned, as in a prompt, the weight is 1 however
samples are grouped; where it is, the weight is that of the micro-batch, and stock runs with other micro-batches differ
as much.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from forked_runs import train
from rounding import assert_equal
from training_run import Recorded, largest_difference

NUM_STEPS = 3
GLOBAL_BATCH_SIZE = 8
SEQ_LENGTH = 128
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64 "
    f"--seq-length {SEQ_LENGTH} --max-position-embeddings {SEQ_LENGTH} --global-batch-size {GLOBAL_BATCH_SIZE} "
    f"--train-iters {NUM_STEPS} --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3"
)
PACKED = f"--use-dynamic-batch-size --max-tokens-per-gpu {2 * SEQ_LENGTH} --balance-data --balance-by-flops"
FILLED = f"--balance-data --balance-shape-bucket {SEQ_LENGTH * 3 // 2}"


def run(folder: Path, flags: str = "", *, prompts: bool, shortest: int = 20, num_ranks: int = 2) -> Recorded:
    """Train on rows of random tokens, a third of each a prompt or all of it learned."""
    rng = np.random.default_rng(5)
    rows = []
    for length in rng.integers(shortest, SEQ_LENGTH + 1, NUM_STEPS * GLOBAL_BATCH_SIZE).tolist():
        num_unlearned = length // 3 if prompts else 0
        mask = [0] * num_unlearned + [1] * (length + 1 - num_unlearned)
        rows.append({"tokens": rng.integers(0, 257, length + 1).tolist(), "loss_mask": mask})
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = f"{FLAGS} {flags} --data-path {folder / 'rows.jsonl'}"
    return train(folder / "run", command.split(), num_ranks=num_ranks, module="mtp_steps")


def test_packs_of_prompts_and_responses_equal_stock(tmp_path: Path) -> None:
    stock = run(tmp_path / "stock", prompts=True)
    ours = run(tmp_path / "ours", PACKED, prompts=True)
    assert any(step["num_microbatches"] < stock.steps[0]["num_microbatches"] for step in ours.steps)
    assert_equal(ours, reference=stock)


def test_packs_of_documents_differ_from_stock_as_stock_with_two_a_micro_batch_does(tmp_path: Path) -> None:
    stock = run(tmp_path / "stock", prompts=False)
    regrouped = run(tmp_path / "regrouped", "--micro-batch-size 2", prompts=False)
    ours = run(tmp_path / "ours", PACKED, prompts=False)
    for key in ("lm_loss", "grad_norm"):
        by_stock = largest_difference(regrouped, reference=stock, key=key)
        assert largest_difference(ours, reference=stock, key=key) <= 3 * by_stock
    assert_equal(run(tmp_path / "filled", FILLED, prompts=False), reference=stock)


@pytest.mark.slow
def test_stages_and_context_parallel_ranks(tmp_path: Path) -> None:
    """Rows are of one length, as stock needs them there; ours are filled up."""
    layout = "--pipeline-model-parallel-size 2 --context-parallel-size 2"
    stock = run(tmp_path / "stock", layout, prompts=False, shortest=SEQ_LENGTH, num_ranks=4)
    ours = run(tmp_path / "ours", f"{layout} {FILLED}", prompts=False, shortest=SEQ_LENGTH, num_ranks=4)
    assert_equal(ours, reference=stock)
