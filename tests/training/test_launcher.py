"""The launcher runs scripts as Python would and says in one line what is wrong; the launch scripts' flags are known.

The training of `make quickstart` takes minutes, and no test runs it whole: here are the plans that take turns in it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import policy_turns
import pytest
import training_run
from kept_runs import KeptRuns, Run
from table import ROWS
from test_matrix import run_of

from megatron_balance import CostModel, Limits, ModelShape, Topology
from megatron_balance.mcore import install

SCRIPTS = training_run.ROOT / "scripts"
MODELS = {"run_sft_megatron.sh": "Qwen3-4B", "run_pretrain_megatron.sh": "Qwen3-30B-A3B"}


def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_balance.launch", *arguments]
    return subprocess.run(command, text=True, capture_output=True, timeout=300, check=False)


@pytest.mark.slow
def test_a_script_gets_its_arguments_and_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("WORD = 'found'\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, neighbour\n"
        "from megatron.training import training\n"
        "print(__name__, sys.argv[1:], neighbour.WORD, training.get_forward_backward_func.__wrapped__.__module__)\n"
    )
    done = launch(str(script), "--balance-data", "x")
    assert done.returncode == 0, done.stderr
    assert "__main__ ['--balance-data', 'x'] found megatron.core.pipeline_parallel.schedules" in done.stdout


@pytest.mark.slow
def test_one_import_line_installs_the_hooks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import megatron_balance.mcore.autoinstall\n"
        "from megatron.training import training\n"
        "print(hasattr(training.get_forward_backward_func, '__wrapped__'))\n"
    )
    done = subprocess.run([sys.executable, str(script)], text=True, capture_output=True, timeout=300, check=False)
    assert done.stdout.split()[-1] == "True", done.stderr


def test_a_missing_script_is_named() -> None:
    done = launch("nowhere.py", "--balance-data")
    assert done.returncode == 2
    assert "there is no script 'nowhere.py'" in done.stderr
    assert "Traceback" not in done.stderr


def test_wrong_flags_end_the_run_with_one_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from megatron.training.arguments import parse_args\nparse_args()\n")
    done = launch(str(script), "--balance-by-flops", "--calculate-per-token-loss")
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("megatron_balance: --balance-by-flops is set: without")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_ranks_that_torchrun_starts_train_as_forks_do(train: KeptRuns, tmp_path: Path) -> None:
    forked, folder = run_of(train, ROWS[0]), tmp_path / "run"
    flags = f"{ROWS[0].stock} {ROWS[0].balance}".replace("{data}", str(train.data)).replace("{run}", str(folder))
    script = training_run.ROOT / "tests" / "kit" / "watched_steps.py"
    training_run.train(folder, flags.split(), num_ranks=2, script=script)
    for ours, theirs in zip(Run(folder, 2).of_kind("step"), forked.of_kind("step"), strict=True):
        for key in ("lm_loss", "grad_norm", "microbatches"):
            assert [step[key] for step in ours] == [step[key] for step in theirs]


@pytest.mark.slow
def test_a_hand_written_loop_needs_no_megatron_training(tmp_path: Path) -> None:
    code = "import sys; sys.modules['megatron.training'] = None; import train_core_loop; train_core_loop.main()"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    settings = {"PYTHONPATH": training_run.search_path(), "OMP_NUM_THREADS": "1", "LOOP": '{"log_interval": 2}'}
    command += [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "megatron_balance: iteration 4 " in done.stdout
    assert all("ranks" in step for steps in training_run.read_records(tmp_path, num_ranks=2) for step in steps)


@pytest.fixture(scope="module")
def parser() -> Iterator[argparse.ArgumentParser]:
    from megatron.training import arguments

    installed = install()
    yield arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    installed.undo()


@pytest.mark.parametrize("script", MODELS)
def test_its_flags_are_known_and_describe_the_model(parser: argparse.ArgumentParser, script: str) -> None:
    done = subprocess.run(
        [SCRIPTS / script, "megatron", "data", "tokenizer", "--save", "here", "--vocab-size", "151936"],
        env=os.environ | {"DRY_RUN": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    command = shlex.split(done.stdout)
    assert command[0] == "torchrun"
    args = parser.parse_args(command[command.index("megatron/pretrain_gpt.py") + 1 :])  # an unknown flag ends here
    assert args.balance_data
    assert args.balance_by_flops
    assert args.save == "here"
    ours, named = ModelShape.from_megatron_args(args), ModelShape.preset(MODELS[script])
    for field in ("hidden_size", "num_layers", "num_query_groups", "kv_channels", "num_experts", "moe_ffn_hidden_size"):
        assert getattr(ours, field) == getattr(named, field)


@pytest.mark.parametrize("script", sorted(path.name for path in SCRIPTS.glob("run_*.sh")))
def test_without_arguments_it_says_how_to_use_it(script: str) -> None:
    done = subprocess.run([SCRIPTS / script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert f"scripts/{script}" in done.stdout + done.stderr


CHOSEN = {
    "use_dynamic_batch_size": True,
    "balance_data": True,
    "balance_by_flops": True,
    "max_tokens_per_gpu": 8192,
    "balance_context_parallel": "all",
}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param("--balance", CHOSEN, id="alone"),
        pytest.param("--balance --context-parallel-size 4", CHOSEN | {"max_tokens_per_gpu": 2048}, id="cap-of-a-gpu"),
        pytest.param("--balance --max-tokens-per-gpu 99", CHOSEN | {"max_tokens_per_gpu": 99}, id="given-cap"),
        pytest.param("--balance --balance-context-parallel off", CHOSEN | {"balance_context_parallel": None}, id="off"),
        pytest.param(
            "--balance --no-balance-data", CHOSEN | {"balance_data": False, "balance_context_parallel": None}, id="stay"
        ),
        pytest.param(
            "--balance --multi-latent-attention",
            CHOSEN | {"balance_context_parallel": None},
            id="nothing-is-against-it",
        ),
        pytest.param("", dict.fromkeys(CHOSEN), id="without"),
    ],
)
def test_one_flag_leaves_what_is_given(
    parser: argparse.ArgumentParser, given: str, expected: dict[str, object]
) -> None:
    rows = "--calculate-per-token-loss --micro-batch-size 2 --seq-length 4096 --transformer-impl local"
    rows += " --spec thd_attention thd_block_spec"
    args = parser.parse_args(f"{rows} {given}".split())
    assert {name: getattr(args, name) for name in CHOSEN} == expected


LENGTHS = np.array([100, 900, 60, 3000, 40, 700, 80, 90])
HOMES = np.arange(LENGTHS.size) % 4
COST = CostModel(linear=500, quadratic=1, cp_exchange=5)


@pytest.mark.parametrize("policy", policy_turns.POLICIES[1:])
def test_each_policy_has_a_plan_of_its_kind(policy: str) -> None:
    schedule = policy_turns.plan_of(
        policy,
        LENGTHS,
        cost_model=COST,
        topology=Topology(4, dynamic_cp=True),
        limits=Limits(4096),
        home_ranks=HOMES,
    ).check()
    moved = bool((schedule.destinations() != HOMES).any())
    assert moved is (policy != "packed")
    assert bool(schedule.cp_size_grid.max() > 1) is (policy == "dynamic_cp")
