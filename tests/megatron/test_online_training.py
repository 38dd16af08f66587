"""Online calibration on the real training loop: it fits, its figures travel with the checkpoint, nothing hangs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from forked_runs import train
from rounding import assert_equal
from training_run import Recorded

from megatron_balance.cost.calibration import Calibration

NUM_STEPS = 7
FLAGS = (
    "--hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64 --seq-length 512 "
    "--max-position-embeddings 512 --global-batch-size 16 --ckpt-format torch --use-dynamic-batch-size "
    "--max-tokens-per-gpu 1024 --balance-data --balance-by-flops"
)
ONLINE = "--balance-calibrate-online"


def run(folder: Path, flags: str, *, num_ranks: int = 2, num_steps: int = NUM_STEPS) -> Recorded:
    return train(folder, f"{FLAGS} --train-iters {num_steps} {flags}".split(), num_ranks=num_ranks)


def saved_state(checkpoints: Path, *, step: int) -> dict[str, Any]:
    return json.loads((checkpoints / "megatron_balance" / f"iter_{step:07d}" / "online_calibration.json").read_text())


def test_what_was_learned_goes_on_after_a_restart(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    flags = f"--num-layers 1 {ONLINE} --save {checkpoints} --save-interval {NUM_STEPS} --exit-interval {NUM_STEPS}"
    whole = run(tmp_path / "whole", flags, num_steps=NUM_STEPS + 1)
    state = saved_state(checkpoints, step=NUM_STEPS)
    assert state["num_steps"] == NUM_STEPS
    assert len(state["coefficients"]) == 4
    assert max(state["coefficients"]) > 0
    assert re.search(r"calibrated, off by \d", whole.output)

    # Between step 7 and the refit before step 8 lies one step: it plans with the very coefficients that were saved.
    again = tmp_path / "again"
    flags = f"--num-layers 1 {ONLINE} --load {checkpoints} --save {again} --save-interval 1"
    run(tmp_path / "resumed", flags, num_steps=NUM_STEPS + 1)
    resumed = saved_state(again, step=NUM_STEPS + 1)
    assert resumed == state | {"num_steps": NUM_STEPS + 1}


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param("--num-layers 2 --pipeline-model-parallel-size 2", id="PP2"),
        pytest.param("--num-layers 1 --tensor-model-parallel-size 2", id="TP2"),
    ],
)
def test_ranks_of_a_replica_agree(tmp_path: Path, parallel: str) -> None:
    # Stages that planned differently would fail the run; so would data-parallel ranks.
    flags = f"{parallel} {ONLINE} --save {tmp_path / 'c'} --save-interval {NUM_STEPS}"
    run(tmp_path / "run", flags, num_ranks=4)
    assert saved_state(tmp_path / "c", step=NUM_STEPS)["coefficients"] is not None


def test_sizes_of_their_own(tmp_path: Path) -> None:
    """Micro-batches count at their sizes: all ranks plan with one fit, and train as at one size."""
    parallel = "--num-layers 1 --context-parallel-size 2"
    static = run(tmp_path / "static", parallel, num_ranks=4)
    online = f"--max-tokens-per-gpu 256 --balance-context-parallel {ONLINE}"
    ours = run(
        tmp_path / "ours", f"{parallel} {online} --save {tmp_path / 'c'} --save-interval {NUM_STEPS}", num_ranks=4
    )
    assert_equal(ours, reference=static)
    state = saved_state(tmp_path / "c", step=NUM_STEPS)
    assert len(state["coefficients"]) in (4, 5)
    assert state["error"] < 1
    assert re.search(
        r"keys and values from context-parallel ranks: \d.*assumed from 450 GB/s within a node", ours.output
    )
    assert re.search(r"calibrated, off by \d", ours.output)
    assert any(len(set(step["cp_sizes"])) > 1 for steps in ours.ranks for step in steps)


def test_a_calibration_file_is_the_cost(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    Calibration(per_microbatch=1e-2, per_sequence=1e-4, linear=1e-6, quadratic=1e-9).write(path)
    calibrated = run(tmp_path / "run", f"--num-layers 1 --balance-calibration {path}", num_steps=2)
    step = calibrated.steps[0]
    by_flops = run(tmp_path / "flops", "--num-layers 1", num_steps=2).steps[0]
    assert step["lengths"] == by_flops["lengths"]
    assert step["ranks"] != by_flops["ranks"]
    # Launches are dear here: as few micro-batches as there can be.
    assert step["num_microbatches"] == -(-sum(step["lengths"]) // 2048)
