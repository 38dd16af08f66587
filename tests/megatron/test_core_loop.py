"""A hand-written loop on megatron.core trains balanced as it trains stock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forked_runs import train
from rounding import assert_equal
from training_run import Recorded, RunFailed, read_records, search_path

from megatron_balance.devkit.smoke import ENVIRONMENT

NUM_STEPS = 4
NUM_ITEMS = 6
"""Rows that a data-parallel rank loads in a step."""

WITHOUT_TRAINING = """
import sys
sys.modules["megatron.training"] = None
import train_core_loop
train_core_loop.main()
"""


def run(folder: Path, *, num_ranks: int = 2, **settings: Any) -> Recorded:
    loop = json.dumps({"num_steps": NUM_STEPS, "num_items": NUM_ITEMS, **settings})
    folder.mkdir(exist_ok=True)
    return train(folder, [], num_ranks=num_ranks, module="train_core_loop", environment={"LOOP": loop})


@pytest.mark.parametrize(
    ("layout", "num_ranks"),
    [
        pytest.param({}, 2, id="DP2"),
        pytest.param({"tp_size": 2}, 4, id="TP2-DP2"),
        pytest.param({"pp_size": 2}, 4, id="PP2-DP2"),
        # Stock messages of a virtual pipeline do not vary in length.
        pytest.param({"pp_size": 2, "vpp_size": 2, "filled": True}, 4, id="PP2-VPP2-DP2"),
    ],
)
def test_a_balanced_loop_trains_as_stock(tmp_path: Path, layout: dict[str, Any], num_ranks: int) -> None:
    stock = run(tmp_path / "stock", num_ranks=num_ranks, balanced=False, **layout)
    ours = run(tmp_path / "ours", num_ranks=num_ranks, **layout)
    assert len(ours.steps) == NUM_STEPS
    assert_equal(ours, reference=stock)
    for steps in ours.ranks:
        for step in steps:
            samples = [sample for slots in step["ranks"] for slot in slots for sample in slot]
            assert sorted(samples) == list(range(len(step["lengths"])))
            assert len(samples) > 2 * NUM_ITEMS  # sequences, not rows
            assert max(step["imbalance"]) < 1.2 * sum(step["imbalance"]) / len(step["imbalance"])


def test_a_loop_without_megatron_training(tmp_path: Path) -> None:
    """No hook of `install()`, no module of megatron.training; nothing says how many steps there are."""
    ours = tmp_path / "ours"
    ours.mkdir()
    settings = {"num_steps": NUM_STEPS, "num_items": NUM_ITEMS, "log_interval": 2}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "--no-python", sys.executable, "-c", WITHOUT_TRAINING, str(ours)],
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": search_path(), "LOOP": json.dumps(settings)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.count("megatron_balance: iteration ") == NUM_STEPS // 2
    assert "WARNING" not in done.stdout
    stock = run(tmp_path / "stock", balanced=False)
    assert_equal(Recorded(read_records(ours, num_ranks=2), done.stdout), reference=stock)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        pytest.param(
            {"config": {"calculate_per_token_loss": False}},
            "--calculate-per-token-loss is not set: .*add --calculate-per-token-loss",
            id="mean-of-means",
        ),
        pytest.param(
            {"flags": ["--balance-lookahead", "2"]}, "--balance-lookahead is set in a hand-written", id="pool"
        ),
        pytest.param(
            {"flags": ["--balance-evaluation"]}, "--balance-evaluation is set in a hand-written", id="evaluation"
        ),
        pytest.param({"flags": ["--balance-dat"]}, "unrecognized arguments: --balance-dat", id="misspelt"),
    ],
)
def test_what_a_loop_cannot_have_is_refused(tmp_path: Path, settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(RunFailed, match=problem):
        run(tmp_path, num_ranks=1, **settings)
