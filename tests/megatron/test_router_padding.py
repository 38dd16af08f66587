"""MoE routers count no padding, filler or dummies: in a model alone, and in training against stock Megatron."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked_runs import train
from rounding import FP32_ULP, ULPS, assert_equal
from training_run import Recorded

from megatron_balance.devkit.smoke import ENVIRONMENT

SCRIPT = Path(__file__).with_name("router_runs.py")
STATISTICS = ("aux_loss", "seq_aux_loss", "global_aux_loss", "z_loss", "expert_bias")


@pytest.fixture(scope="module")
def routed() -> dict[str, dict[str, list[float]]]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env=os.environ | ENVIRONMENT,
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def largest_difference(figures: dict[str, list[float]], way: str) -> float:
    """From the sequences without padding, relative to the largest figure."""
    reference = np.array(figures["reference"])
    return float(np.abs(np.array(figures[way]) - reference).max() / np.abs(reference).max())


@pytest.mark.parametrize("statistic", STATISTICS)
class TestDecoderAndMultiTokenPrediction:
    def test_padding_filler_and_dummies_count_nowhere(self, routed: dict[str, Any], statistic: str) -> None:
        assert largest_difference(routed[statistic], "with mask") <= ULPS * FP32_ULP

    def test_a_dummy_alone_counts_nothing_and_divides_by_nothing(self, routed: dict[str, Any], statistic: str) -> None:
        assert not np.any(routed[statistic]["a dummy alone"])

    @pytest.mark.parametrize("way", ["with a mask shifted by one", "without mask"])
    def test_a_wrong_mask_is_seen(self, routed: dict[str, Any], statistic: str, way: str) -> None:
        assert largest_difference(routed[statistic], way) > 0.05


NUM_STEPS = 3
GLOBAL_BATCH_SIZE = 8
SEQ_LENGTH = 128
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64 "
    f"--seq-length {SEQ_LENGTH} --max-position-embeddings {SEQ_LENGTH} --global-batch-size {GLOBAL_BATCH_SIZE} "
    f"--train-iters {NUM_STEPS} --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
    "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1 --moe-router-score-function sigmoid "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1 --moe-z-loss-coeff 1e-2 "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.1"
)
ONE_A_MICROBATCH = "--balance-data"
"""As stock groups them: an auxiliary loss depends on which samples share a micro-batch."""
FILLED = f"{ONE_A_MICROBATCH} --balance-shape-bucket {SEQ_LENGTH * 3 // 2}"
SEQUENCE_PARALLEL = "--tensor-model-parallel-size 2 --sequence-parallel"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def run(folder: Path, flags: str, *, lengths: list[int], num_ranks: int) -> Recorded:
    """Train on rows of these lengths."""
    rng = np.random.default_rng(3)
    rows = [{"tokens": rng.integers(0, 257, length + 1).tolist()} for length in lengths]
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = f"--data-path {folder / 'rows.jsonl'}"
    return train(folder / "run", f"{FLAGS} {flags} {data}".split(), num_ranks=num_ranks)


def lengths(*, multiple: int) -> list[int]:
    """Of a run's rows."""
    rng = np.random.default_rng(4)
    return (rng.integers(10 // multiple, SEQ_LENGTH // multiple, NUM_STEPS * GLOBAL_BATCH_SIZE) * multiple).tolist()


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return run(tmp_path_factory.mktemp("stock") / "run", "", lengths=lengths(multiple=1), num_ranks=2)


class TestTraining:
    """Gradient norms hold the gradients of the auxiliary losses; expert biases decide which experts add to the loss."""

    @pytest.mark.parametrize(
        ("flags", "num_ranks"),
        [
            pytest.param(FILLED, 2, id="filler"),
            pytest.param(f"{ONE_A_MICROBATCH} --context-parallel-size 2 {RECOMPUTED}", 4, id="padding-CP2-recomputed"),
        ],
    )
    def test_equals_stock_on_rows_without_padding(
        self, stock: Recorded, tmp_path: Path, flags: str, num_ranks: int
    ) -> None:
        ours = run(tmp_path / "ours", flags, lengths=lengths(multiple=1), num_ranks=num_ranks)
        assert_equal(ours, reference=stock)

    def test_filler_on_every_stage_and_tensor_parallel_rank(self, tmp_path: Path) -> None:
        layout, rows = f"{SEQUENCE_PARALLEL} --pipeline-model-parallel-size 2", [SEQ_LENGTH] * 24
        stock = run(tmp_path / "stock", layout, lengths=rows, num_ranks=4)
        ours = run(tmp_path / "ours", f"{layout} {FILLED}", lengths=rows, num_ranks=4)
        assert_equal(ours, reference=stock)

    def test_padding_split_over_sequence_and_context_parallel_ranks(self, tmp_path: Path) -> None:
        layout, rows = f"{SEQUENCE_PARALLEL} {ONE_A_MICROBATCH}", lengths(multiple=2)
        without = run(tmp_path / "without", layout, lengths=rows, num_ranks=2)
        padded = run(tmp_path / "padded", f"{layout} --context-parallel-size 2", lengths=rows, num_ranks=4)
        tokens = [sum(step["microbatch_tokens"]) for step in without.steps]
        assert tokens == [sum(step["lengths"]) for step in without.steps]
        assert all(sum(step["microbatch_tokens"]) > real for step, real in zip(padded.steps, tokens, strict=True))
        assert_equal(padded, reference=without)
