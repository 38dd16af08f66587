"""`--balance` alone: what it fills in, what it leaves to flags that are given, and that training stays equal."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from forked_runs import train
from rounding import assert_equal

from megatron_balance import BalanceError
from megatron_balance.mcore.setup.command_line import parse_command_line
from megatron_balance.mcore.setup.flags import add_balance_args

PER_TOKEN = "--calculate-per-token-loss"
ROWS = f"{PER_TOKEN} --micro-batch-size 2 --seq-length 4096"
LOCAL = "--transformer-impl local"


def flags_of(given: str) -> argparse.Namespace:
    return parse_command_line(given.split()).args


def chosen(given: str) -> dict[str, object]:
    args = flags_of(given)
    names = ("use_dynamic_batch_size", "balance_data", "balance_by_flops", "max_tokens_per_gpu")
    return {name: getattr(args, name) for name in (*names, "balance_context_parallel")}


ALL = {
    "use_dynamic_batch_size": True,
    "balance_data": True,
    "balance_by_flops": True,
    "max_tokens_per_gpu": 8192,
    "balance_context_parallel": "all",
}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param("--balance", ALL, id="alone"),
        pytest.param("--balance --context-parallel-size 4", {**ALL, "max_tokens_per_gpu": 2048}, id="cap-of-a-gpu"),
        pytest.param("--balance --max-tokens-per-gpu auto", {**ALL, "max_tokens_per_gpu": "auto"}, id="given-cap"),
        pytest.param("--balance --balance-context-parallel 2", {**ALL, "balance_context_parallel": 2}, id="given-size"),
        pytest.param("--balance --balance-context-parallel off", {**ALL, "balance_context_parallel": None}, id="off"),
        pytest.param("--balance --no-balance-by-flops", {**ALL, "balance_by_flops": False}, id="tokens"),
        pytest.param(
            "--balance --no-balance-data",
            {**ALL, "balance_data": False, "balance_context_parallel": None},
            id="samples-stay",
        ),
        pytest.param("", dict.fromkeys(ALL), id="without"),
    ],
)
def test_flags_that_are_given_keep_their_values(given: str, expected: dict[str, object]) -> None:
    assert chosen(f"{ROWS} {LOCAL} {given}") == expected


def test_samples_of_fixed_micro_batches_move_by_tokens() -> None:
    kept = chosen(f"{ROWS} {LOCAL} --balance --no-use-dynamic-batch-size")
    assert kept == dict.fromkeys(ALL) | {"use_dynamic_batch_size": False, "balance_data": True}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        pytest.param("", "--transformer-impl is transformer_engine", id="a-caution"),
        pytest.param(f"{LOCAL} --multi-latent-attention", "--multi-latent-attention is set", id="a-refusal"),
    ],
)
def test_sizes_of_their_own_only_where_nothing_is_against_it(given: str, reason: str) -> None:
    args = flags_of(f"{ROWS} --balance {given}")
    assert args.balance_context_parallel is None
    assert args.balance_choices[-1].startswith(f"no --balance-context-parallel ({reason}")


def test_every_choice_has_its_reason() -> None:
    choices = flags_of(f"{ROWS} {LOCAL} --balance --balance-data").balance_choices
    flags = ["--use-dynamic-batch-size (", "--max-tokens-per-gpu 8192 (", "--balance-by-flops ("]
    assert [choice.partition("(")[0] + "(" for choice in choices] == [*flags, "--balance-context-parallel all ("]


def test_what_is_missing_is_an_error_with_the_remedy() -> None:
    parser = add_balance_args(argparse.ArgumentParser())
    parser.add_argument("--seq-length", type=int)
    parser.add_argument("--calculate-per-token-loss", action="store_true")
    with pytest.raises(BalanceError, match="add --calculate-per-token-loss"):
        parser.parse_args(["--balance", "--seq-length", "64"])
    with pytest.raises(BalanceError, match="--max-tokens-per-gpu is None"):
        parser.parse_args(["--balance", PER_TOKEN])


def test_training_with_it_is_equal_to_stock(tmp_path: Path) -> None:
    flags = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64"
    flags += " --seq-length 512 --max-position-embeddings 512 --global-batch-size 16 --train-iters 3"
    stock = train(tmp_path / "stock", flags.split(), num_ranks=2)
    ours = train(tmp_path / "ours", [*flags.split(), "--balance"], num_ranks=2)
    assert_equal(ours, reference=stock)
    assert all(step["num_microbatches"] < 8 and "cp_sizes" in step for step in ours.steps)
    (line,) = (line for line in ours.output.splitlines() if "--balance chose" in line)
    assert "--max-tokens-per-gpu 512 (as a stock micro-batch" in line
