"""The launcher runs scripts as Python would and says in one line what is wrong; the launch scripts' flags are known.

The training of `make quickstart` takes minutes, and no test runs it whole: here are the plans that take turns in it,
and what is said of them.
"""

import argparse
import os
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import training_run
from forked import call, run_forked
from training_run import RunFailed

from megatron_balance import ModelShape
from megatron_balance.mcore import add_balance_args, install

SCRIPTS = training_run.ROOT / "scripts"
MODELS = {"run_sft_megatron.sh": "Qwen3-4B", "run_pretrain_megatron.sh": "Qwen3-30B-A3B"}


def launch(*arguments):
    command = [sys.executable, "-m", "megatron_balance.launch", *arguments]
    return subprocess.run(command, text=True, capture_output=True, timeout=300, check=False)


@pytest.mark.slow
def test_a_script_gets_its_arguments_its_folder_and_the_hooks(tmp_path):
    (tmp_path / "neighbour.py").write_text("WORD = 'found'\n")
    script, by_import = tmp_path / "script.py", tmp_path / "by_import.py"
    script.write_text(
        "import sys, neighbour\n"
        "from megatron.training import training\n"
        "print(__name__, sys.argv[1:], neighbour.WORD, training.get_forward_backward_func.__wrapped__.__module__)\n"
    )
    by_import.write_text(f"import megatron_balance.mcore.autoinstall\n{script.read_text()}")
    launched = launch(str(script), "--balance-data", "x")
    command = [sys.executable, str(by_import), "--balance-data", "x"]
    itself = subprocess.run(command, text=True, capture_output=True, timeout=300, check=False)
    assert "installed" not in launched.stderr, "fault: forty lines of kernels that are not installed"
    for done in (launched, itself):
        said = "__main__ ['--balance-data', 'x'] found megatron.core.pipeline_parallel.schedules"
        assert said in done.stdout, done.stderr


def test_the_switch_makes_both_ways_in_stock_runs(monkeypatch, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import megatron_balance.mcore.autoinstall, sys\n"
        "from megatron.training import arguments, training\n"
        "hooked = hasattr(training.get_forward_backward_func, '__wrapped__')\n"
        "print('balance_cost' in arguments.parse_args(), hooked)\n"
    )
    monkeypatch.setenv("MEGATRON_BALANCE", "0")
    flags = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --max-position-embeddings 8"
    done = launch(str(script), *flags.split(), "--micro-batch-size", "1", "--balance-by-flops")
    assert "True False" in done.stdout, done.stderr
    assert done.stderr.count("MEGATRON_BALANCE=0: Megatron runs without balancing, and ignores its flags.") == 1


def launch_here(folder, arguments):
    """In a fork of this process, which has imported Megatron."""

    def run_launcher():
        runpy.run_module("megatron_balance.launch", run_name="__main__")

    run_forked(run_launcher, folder=Path(folder), num_ranks=1, timeout_seconds=100, arguments=["launch", *arguments])


def test_what_is_wrong_ends_the_run_with_one_line(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("from megatron.training.arguments import parse_args\nparse_args()\n")
    for status, says, arguments in (
        (2, "there is no script 'nowhere.py'", ["nowhere.py", "--balance-data"]),
        (1, "\nmegatron_balance: --balance-cost is flops: nothing", [str(script), "--balance-by-flops"]),
    ):
        with pytest.raises(RunFailed) as failure:
            call("test_launcher:launch_here", str(tmp_path / str(status)), [*arguments, "--calculate-per-token-loss"])
        said = str(failure.value).rstrip()
        assert said.startswith(f"rank 0 ended with {status}:")
        assert says in said
        assert "Traceback" not in said


@pytest.mark.slow
def test_a_hand_written_loop_needs_no_megatron_training(tmp_path):
    code = "import sys; sys.modules['megatron.training'] = None; import train_core_loop; train_core_loop.main()"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    settings = {"PYTHONPATH": training_run.search_path(), "OMP_NUM_THREADS": "1", "LOOP": '{"log_interval": 2}'}
    command += [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "megatron_balance: iteration 4 " in done.stdout
    assert all("ranks" in step for steps in training_run.read_records(tmp_path, num_ranks=2) for step in steps)


@pytest.fixture(scope="module")
def parser():
    from megatron.training import arguments

    installed = install()
    yield arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    installed.undo()


SLIME_MODEL = "MODEL_ARGS=(--swiglu --num-layers 36)\n"
COMMANDS = {
    "run_sft_megatron.sh": ["megatron", "data of mine", "tokenizer", "--save", "here", "--vocab-size", "151936"],
    "run_pretrain_megatron.sh": ["megatron", "data of mine", "tokenizer", "--save", "here", "--vocab-size", "151936"],
    "run_own_loop.sh": ["{folder}/record"],
    "run_rl_slime.sh": ["{folder}", "{folder}", "model", "checkpoint", "distributed", "prompts of mine"],
    "run_rl_verl.sh": ["model", "train files", "val files"],
    "run_rl_areal.sh": ["gsm8k_rl.py", "config of mine.yaml", "Qwen3-8B"],
    "run_sft_trl.sh": ["model", "data of mine"],
    "bench": ["cluster", "--", "pretrain_gpt.py", "--data-path", "data of mine"],
    "slurm_two_nodes.sbatch": ["pretrain_gpt.py", "--data-path", "data of mine", "--balance"],
}
"""Of each launch script its arguments."""


@pytest.fixture
def dry_run(tmp_path):
    (tmp_path / "scripts" / "models").mkdir(parents=True)
    (tmp_path / "scripts" / "models" / "model.sh").write_text(SLIME_MODEL)

    def printed(script):
        command = [SCRIPTS / script, *(word.replace("{folder}", str(tmp_path)) for word in COMMANDS[script])]
        environment = os.environ | {"DRY_RUN": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
        return done.stdout.replace(" \\\n", "\n")

    return printed


def test_every_launch_script_is_in_the_table():
    assert {*COMMANDS} - {"bench"} == {path.name for path in SCRIPTS.glob("*_*.s[hb]*")}


@pytest.mark.parametrize("script", COMMANDS)
def test_a_dry_run_prints_a_flag_a_line_and_flags_that_are_known(dry_run, script):
    printed = dry_run(script)
    flags_of_lines = [[word for word in shlex.split(line) if word[:2] == "--"] for line in printed.splitlines()]
    assert max(map(len, flags_of_lines)) <= 1
    words = shlex.split(printed)
    assert not any("of mine" in argument for argument in COMMANDS[script]) or any("of mine" in word for word in words)
    known = add_balance_args(argparse.ArgumentParser())._option_string_actions
    ours = {word for word in words if word.startswith(("--balance", "--use-dynamic", "--max-tokens"))}
    assert ours <= {*known}
    options = [word.partition("=")[2] for word in words if word.startswith("MEGATRON_BALANCE_VERL=")]
    assert {*options} <= {"model=model"}


@pytest.mark.parametrize("script", MODELS)
def test_its_flags_describe_the_model(dry_run, parser, script):
    command = shlex.split(dry_run(script))
    assert command[0] == "torchrun"
    args = parser.parse_args(command[command.index("megatron/pretrain_gpt.py") + 1 :])  # an unknown flag ends here
    assert args.balance_data
    assert args.balance_cost == "flops"
    assert args.save == "here"
    ours, named = ModelShape.from_megatron_args(args), ModelShape.preset(MODELS[script])
    for field in ("hidden_size", "num_layers", "num_query_groups", "kv_channels", "num_experts", "moe_ffn_hidden_size"):
        assert getattr(ours, field) == getattr(named, field)


@pytest.mark.parametrize("script", sorted(path.name for path in SCRIPTS.glob("run_*.sh")))
def test_without_arguments_it_says_how_to_use_it(script):
    done = subprocess.run([SCRIPTS / script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert f"scripts/{script}" in done.stdout + done.stderr


CHOSEN = {
    "use_dynamic_batch_size": True,
    "balance_data": True,
    "balance_cost": "flops",
    "max_tokens_per_gpu": 8192,
    "balance_dynamic_cp": None,
}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--balance", CHOSEN),
        ("--balance --context-parallel-size 4", CHOSEN | {"max_tokens_per_gpu": 2048}),
        ("--balance --max-tokens-per-gpu 99", CHOSEN | {"max_tokens_per_gpu": 99}),
        ("--balance --no-balance-data", CHOSEN | {"balance_data": False}),
        ("--balance --balance-dynamic-cp 2", CHOSEN | {"balance_dynamic_cp": 2}),
        (
            "--balance --no-use-dynamic-batch-size",
            {**dict.fromkeys(CHOSEN), "use_dynamic_batch_size": False, "balance_data": True},
        ),
        ("", dict.fromkeys(CHOSEN)),
    ],
)
def test_one_flag_leaves_what_is_given(parser, given, expected):
    rows = "--calculate-per-token-loss --micro-batch-size 2 --seq-length 4096 --transformer-impl local"
    args = parser.parse_args(f"{rows} --spec thd_attention thd_block_spec {given}".split())
    assert {name: getattr(args, name) for name in CHOSEN} == expected
