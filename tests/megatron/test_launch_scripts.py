"""The launch scripts: their flags are Megatron's and ours, and describe the models they name."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_balance import ModelShape
from megatron_balance.mcore import hooks
from megatron_balance.mcore.setup.arguments import BalanceConfig

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"
MODELS = {"run_sft_megatron.sh": "Qwen3-4B", "run_pretrain_megatron.sh": "Qwen3-30B-A3B"}


@pytest.fixture
def parser() -> Iterator[argparse.ArgumentParser]:
    from megatron.training import arguments

    installed = hooks.install()
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
    flags = command[command.index("megatron/pretrain_gpt.py") + 1 :]
    args = parser.parse_args(flags)  # an unknown flag ends here
    config = BalanceConfig.from_megatron_args(args)
    assert config.balance_data
    assert config.balance_by_flops
    assert args.save == "here"
    ours, named = ModelShape.from_megatron_args(args), ModelShape.preset(MODELS[script])
    for field in ("hidden_size", "num_layers", "num_query_groups", "kv_channels", "num_experts", "moe_ffn_hidden_size"):
        assert getattr(ours, field) == getattr(named, field)


@pytest.mark.parametrize("script", sorted(path.name for path in SCRIPTS.glob("run_*.sh")))
def test_without_arguments_it_says_how_to_use_it(script: str) -> None:
    done = subprocess.run([SCRIPTS / script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"scripts/{script}" in done.stdout + done.stderr


@pytest.mark.parametrize("script", sorted(str(path.relative_to(SCRIPTS)) for path in SCRIPTS.rglob("*.sh")))
def test_it_is_valid_bash(script: str) -> None:
    subprocess.run(["bash", "-n", SCRIPTS / script], check=True)
    assert os.access(SCRIPTS / script, os.X_OK)
