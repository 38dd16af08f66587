"""Look-ahead on the real training loop: every sample once, and a resumed run goes on to the bit."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_runs import train
from training_run import Recorded

NUM_STEPS = 6
SAVED_AT = 3
FLAGS = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64 "
    "--seq-length 512 --max-position-embeddings 512 --global-batch-size 16 --ckpt-format torch "
    f"--train-iters {NUM_STEPS} --use-dynamic-batch-size --max-tokens-per-gpu 1024 --balance-data --balance-by-flops"
)
AHEAD = "--balance-lookahead 3"


def run(folder: Path, flags: str = "") -> Recorded:
    return train(folder, f"{FLAGS} {flags}".split(), num_ranks=2)


def lengths_of(recorded: Recorded) -> Iterator[int]:
    return (length for step in recorded.steps for length in step["lengths"])


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, checkpoints: Path) -> Recorded:
    return run(tmp_path_factory.mktemp("whole"), f"{AHEAD} --save {checkpoints} --save-interval {SAVED_AT}")


def test_every_sample_is_trained_on_once_in_steps_that_are_more_alike(tmp_path: Path, whole: Recorded) -> None:
    in_order = run(tmp_path)
    assert Counter(lengths_of(whole)) == Counter(lengths_of(in_order))
    assert [step["lengths"] for step in whole.steps] != [step["lengths"] for step in in_order.steps]
    assert all(len(step["lengths"]) == 16 for step in whole.steps)


def test_a_resumed_run_equals_one_that_was_not_interrupted(tmp_path: Path, whole: Recorded, checkpoints: Path) -> None:
    shutil.rmtree(checkpoints / f"iter_{NUM_STEPS:07d}")
    (checkpoints / "latest_checkpointed_iteration.txt").write_text(f"{SAVED_AT}")
    resumed = run(tmp_path, f"{AHEAD} --load {checkpoints}")
    expected = [(step["lm_loss"], step["grad_norm"], step["lengths"]) for step in whole.steps[SAVED_AT:]]
    assert [(step["lm_loss"], step["grad_norm"], step["lengths"]) for step in resumed.steps] == expected
