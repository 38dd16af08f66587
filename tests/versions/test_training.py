"""Two data-parallel ranks on one release of Megatron, every hook active; scripts/check versions chooses the release.

The release that `.venv` has is tested by tests/training; here are the others, and checkouts.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from kept_runs import Run, write_rows
from training_run import ROOT, assert_equal, train

from megatron_balance.record import read_record

NUM_STEPS = 6
SAVED_AT = 3
SETS = {"train": range(1, 65), "first": range(70, 81), "second": range(90, 96)}
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64 "
    f"--seq-length 512 --max-position-embeddings 512 --global-batch-size 16 --train-iters {NUM_STEPS} "
    f"--ckpt-format torch --eval-interval {NUM_STEPS} --full-validation --multiple-validation-sets"
)
BY_FLOPS = "--use-dynamic-batch-size --max-tokens-per-gpu 1024 --balance-data --balance-by-flops"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Flags of a train set and two validation sets."""
    folder = tmp_path_factory.mktemp("data")
    for seed, (name, firsts) in enumerate(SETS.items()):
        write_rows(folder / name, firsts, longest=400, seed=seed)
    return f"--train-data-path {folder}/train --valid-data-path {folder}/first {folder}/second"


def run(folder: Path, flags: str) -> tuple[Run, str]:
    """The run, and all that was printed."""
    script = ROOT / "tests" / "kit" / "watched_steps.py"
    output = train(folder / "steps", f"{FLAGS} {flags}".split(), num_ranks=2, script=script).output
    return Run(folder / "steps", 2), output


def test_the_doctor_finds_nothing() -> None:
    doctor = [sys.executable, "-m", "megatron_balance", "doctor"]
    done = subprocess.run(doctor, text=True, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^ *ok +megatron-core 0\.\d+\.\d+ loads$", done.stdout, re.MULTILINE)
    assert done.stdout.count("ok       megatron.") > 6  # hooks


def test_losses_gradients_and_evaluations_are_those_of_a_stock_run(tmp_path: Path, data: str) -> None:
    stock, said = run(tmp_path / "stock", data)
    assert "megatron_balance:" not in said
    record, checkpoints = tmp_path / "record", tmp_path / "checkpoints"
    saved = f"--save {checkpoints} --save-interval {SAVED_AT}"
    ours, said = run(tmp_path / "ours", f"{data} {BY_FLOPS} --balance-record {record} {saved}")
    assert len(ours.steps) == len(stock.steps) == NUM_STEPS
    assert_equal(ours, reference=stock)
    assert ours.losses() == [pytest.approx(losses, rel=1e-6) for losses in stock.losses()]
    # A line a step, and seconds of forward and backward passes: backward_step is hooked.
    assert said.count("megatron_balance: iteration ") == NUM_STEPS
    steps = read_record(record).steps
    assert [step.iteration for step in steps] == list(range(1, NUM_STEPS + 1))
    assert all(np.all(step.seconds.sum(axis=1) > 0) for step in steps)
    shutil.rmtree(checkpoints / f"iter_{NUM_STEPS:07d}")
    (checkpoints / "latest_checkpointed_iteration.txt").write_text(f"{SAVED_AT}")
    resumed, _ = run(tmp_path / "resumed", f"{data} {BY_FLOPS} --load {checkpoints}")
    for key in ("lm_loss", "grad_norm"):
        assert [step[key] for step in resumed.steps] == [step[key] for step in ours.steps[SAVED_AT:]]
