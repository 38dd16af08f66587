"""Padded rows train, as packs of their true lengths, with the losses of the padded run.

MEGATRON_CHECKOUT=DIR python -m pytest -m checkout tests/megatron/test_padded_rows.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from forked_runs import train
from rounding import ALLOWANCES, assert_equal
from training_run import Recorded, RunFailed

NUM_STEPS = 4
SEQ_LENGTH = 256
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64 "
    f"--seq-length {SEQ_LENGTH} --max-position-embeddings {SEQ_LENGTH} --global-batch-size 16 --micro-batch-size 2 "
    f"--train-iters {NUM_STEPS}"
)
EXPERTS = (
    "--expert-model-parallel-size 2 --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
    "--moe-ffn-hidden-size 32"
)
BALANCED = f"--use-dynamic-batch-size --max-tokens-per-gpu {2 * SEQ_LENGTH} --balance-data --balance-by-flops"


def run(folder: Path, *flags: str, num_ranks: int = 2) -> Recorded:
    module = "benchmarks.loops.padded_training"
    return train(folder, " ".join((FLAGS, *flags)).split(), num_ranks=num_ranks, module=module)


@pytest.mark.parametrize(
    ("parallel", "num_ranks"),
    [
        pytest.param("", 2, id="DP2"),
        pytest.param("--tensor-model-parallel-size 2 --sequence-parallel", 2, id="TP2-SP"),
        pytest.param("--pipeline-model-parallel-size 2", 4, id="PP2-DP2"),
        pytest.param(f"{EXPERTS} --moe-router-load-balancing-type none", 2, id="EP2"),
    ],
)
def test_as_the_padded_run(tmp_path: Path, parallel: str, num_ranks: int) -> None:
    padded = run(tmp_path / "padded", parallel, num_ranks=num_ranks)
    ours = run(tmp_path / "ours", parallel, BALANCED, "--balance-unpad 0", num_ranks=num_ranks)
    assert len(ours.steps) == NUM_STEPS
    assert_equal(ours, reference=padded)
    planned = next(steps for steps in ours.ranks if "lengths" in steps[0])
    for step in planned:
        assert len(step["lengths"]) == 16
        assert min(step["lengths"]) < SEQ_LENGTH / 2
        assert sum(step["microbatch_tokens"]) < 0.9 * SEQ_LENGTH * 16 / len(step["ranks"])


def test_router_losses_leave_out_padding(tmp_path: Path) -> None:
    """Losses of tokens are equal before the first update; the gradient has another term of the routers."""
    routers = f"{EXPERTS} --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.1"
    padded = run(tmp_path / "padded", routers).steps
    ours = run(tmp_path / "ours", routers, BALANCED, "--balance-unpad 0").steps
    allowed = ALLOWANCES["fp32"]
    assert ours[0]["lm_loss"] == pytest.approx(padded[0]["lm_loss"], rel=allowed.loss)
    assert ours[0]["grad_norm"] != pytest.approx(padded[0]["grad_norm"], rel=allowed.grad_norm)
    assert ours[-1]["lm_loss"] < ours[0]["lm_loss"]


def test_without_the_flag_the_error_names_it(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"the data has no cu_seqlens: .*add --balance-unpad where rows are padded"):
        run(tmp_path, BALANCED)


@pytest.mark.checkout
@pytest.mark.skipif("MEGATRON_CHECKOUT" not in os.environ, reason="MEGATRON_CHECKOUT names no checkout")
def test_the_example_of_a_checkout(tmp_path: Path) -> None:
    """Two data-parallel ranks of two tensor-parallel ranks, with Megatron's own attention and mask, and balanced."""
    padded, ours = (
        train(tmp_path / balanced, [], num_ranks=4, module="example_loop", environment={"BALANCED": balanced})
        for balanced in ("0", "1")
    )
    assert len(ours.steps) == 5
    assert_equal(ours, reference=padded)
