"""Two data-parallel ranks on one release of Megatron, every hook active; scripts/check versions chooses the release.

The release that `.venv` has is tested by tests/megatron; here are the others, and checkouts.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rounding import assert_equal
from training_run import ROOT, Recorded, train

from benchmarks.evaluation.rows import write_rows
from megatron_balance.mcore.hooks import hooks_of, supported_version
from megatron_balance.record.run_record import read_record

RECORD_EVALUATIONS = ROOT / "benchmarks" / "evaluation" / "recorded.py"
NUM_STEPS = 6
SAVED_AT = 3
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64 "
    f"--seq-length 512 --max-position-embeddings 512 --global-batch-size 16 --train-iters {NUM_STEPS} "
    "--ckpt-format torch"
)
BY_FLOPS = "--use-dynamic-batch-size --max-tokens-per-gpu 1024 --balance-data --balance-by-flops"


def run(folder: Path, flags: str = "") -> Recorded:
    return train(folder / "steps", f"{FLAGS} {flags}".split(), num_ranks=2)


def test_the_doctor_finds_nothing() -> None:
    doctor = [sys.executable, "-m", "megatron_balance", "doctor", "--no-smoke"]
    done = subprocess.run(doctor, text=True, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^ *ok +megatron-core 0\.\d+\.\d+, with megatron\.training$", done.stdout, re.MULTILINE)
    registered = "sequence_packing_scheduler may be 'megatron_balance'" in done.stdout  # from 0.20 on
    assert done.stdout.count("ok       megatron.") == len(hooks_of(supported_version())) + registered


def test_loss_and_gradient_norm_are_those_of_a_stock_run(tmp_path: Path) -> None:
    stock = run(tmp_path / "stock")
    assert "megatron_balance:" not in stock.output
    ours = run(tmp_path / "ours", f"{BY_FLOPS} --balance-calibrate-online --balance-record {tmp_path / 'record'}")
    assert len(ours.steps) == len(stock.steps) == NUM_STEPS
    assert_equal(ours, reference=stock)
    assert any(step["num_microbatches"] < stock.steps[0]["num_microbatches"] for step in ours.steps)
    # training_log and backward_step are hooked: a line a step, and seconds of forward and backward passes.
    assert ours.output.count("megatron_balance: iteration ") == NUM_STEPS
    record = read_record(tmp_path / "record")
    assert [step.iteration for step in record.steps] == list(range(1, NUM_STEPS + 1))
    assert all(np.all(step.seconds.sum(axis=1) > 0) for step in record.steps)


def test_evaluation_has_the_loss_of_a_stock_run(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(8, 400, 64)
    first, second = (
        write_rows(tmp_path / name, lengths=lengths[:size], seed=size) for name, size in (("first", 11), ("second", 6))
    )
    train_set = write_rows(tmp_path / "train", lengths=lengths, seed=0)
    flags = (
        f"{FLAGS} --eval-interval {NUM_STEPS} --full-validation --multiple-validation-sets "
        f"--train-data-path {train_set} --valid-data-path {first} {second}"
    )

    def evaluated(name: str, *more: str) -> list[dict[str, Any]]:
        recorded = train(tmp_path / name, [*flags.split(), *more], num_ranks=2, script=RECORD_EVALUATIONS)
        return [row for row in recorded.ranks[0] if "evaluation" in row]

    stock, ours = evaluated("stock"), evaluated("ours", *BY_FLOPS.split())
    assert all(row["microbatch_tokens"] for row in ours)
    for figure in ("evaluation", "consumed"):
        assert len(stock) == 4  # after the last step and at the end, two sets each
        assert [row[figure] for row in ours] == [pytest.approx(row[figure], rel=1e-6) for row in stock]


def test_a_resumed_run_with_lookahead_goes_on_to_the_bit(tmp_path: Path) -> None:
    flags, checkpoints = f"{BY_FLOPS} --balance-lookahead 2", tmp_path / "checkpoints"
    whole = run(tmp_path / "whole", f"{flags} --save {checkpoints} --save-interval {SAVED_AT}")
    shutil.rmtree(checkpoints / f"iter_{NUM_STEPS:07d}")
    (checkpoints / "latest_checkpointed_iteration.txt").write_text(f"{SAVED_AT}")
    resumed = run(tmp_path / "resumed", f"{flags} --load {checkpoints}")
    expected = [(step["lm_loss"], step["grad_norm"], step["lengths"]) for step in whole.steps[SAVED_AT:]]
    assert [(step["lm_loss"], step["grad_norm"], step["lengths"]) for step in resumed.steps] == expected
