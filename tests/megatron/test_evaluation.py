"""Balanced evaluation has the loss of stock evaluation, by real `pretrain()` runs on the same data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from forked_runs import train
from rounding import assert_equal
from training_run import Recorded

NUM_ITERATIONS, GLOBAL_BATCH_SIZE = 3, 8
FLAGS = (
    "--hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64 --num-layers 2 "
    "--seq-length 512 --max-position-embeddings 512 --train-iters 4 --eval-interval 2 "
    f"--global-batch-size {GLOBAL_BATCH_SIZE}"
)
EVALUATED = f"--eval-iters {NUM_ITERATIONS}"
BALANCED = "--use-dynamic-batch-size --max-tokens-per-gpu 1024 --balance-data --balance-by-flops"


def run(folder: Path, *flags: str, num_ranks: int = 2) -> Recorded:
    return train(
        folder, " ".join((FLAGS, *flags)).split(), num_ranks=num_ranks, module="benchmarks.evaluation.recorded"
    )


def evaluations(recorded: Recorded) -> list[list[dict[str, Any]]]:
    """Each rank's, of ranks that know the loss."""
    rows = [[row for row in steps if "evaluation" in row] for steps in recorded.ranks]
    return [of_rank for of_rank in rows if of_rank[0]["evaluation"]]


def training(recorded: Recorded) -> Recorded:
    steps = [[row for row in steps if "evaluation" not in row] for steps in recorded.ranks]
    return Recorded(steps, output=recorded.output)


def loss_by_tokens(recorded: Recorded) -> list[tuple[float, float]]:
    """Of every evaluation the sum over tokens divided by tokens, and the tokens, of all ranks and iterations."""
    figures = []
    for of_ranks in zip(*evaluations(recorded), strict=True):
        sums = [sums for row in of_ranks for sums in row["sums"]]
        loss, tokens = (sum(column) for column in zip(*sums, strict=True))
        figures.append((loss / tokens, tokens))
    return figures


def losses(of_rank: list[dict[str, Any]]) -> list[float]:
    return [row["evaluation"]["lm loss"] for row in of_rank]


def assert_balanced(ours: Recorded, *, stock: Recorded, sft: bool = False) -> None:
    expected = loss_by_tokens(stock)
    assert len(expected) >= 2
    assert [tokens for _, tokens in loss_by_tokens(ours)] == [tokens for _, tokens in expected]
    for of_rank in evaluations(ours):
        assert [row["evaluation"]["lm loss"] for row in of_rank] == [
            pytest.approx(loss, rel=1e-6) for loss, _ in expected
        ]
        assert all(row["consumed"] == NUM_ITERATIONS * GLOBAL_BATCH_SIZE for row in of_rank)
        assert all(row["sft"] is sft for row in of_rank)
        assert all(0 < len(row["microbatch_tokens"]) <= NUM_ITERATIONS * GLOBAL_BATCH_SIZE // 2 for row in of_rank)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return run(tmp_path_factory.mktemp("stock"), EVALUATED)


LAYOUTS = [
    pytest.param("", 2, id="DP2"),
    pytest.param("--pipeline-model-parallel-size 2", 4, id="PP2"),
    pytest.param(
        "--pipeline-model-parallel-size 2 --num-layers 4 --num-layers-per-virtual-pipeline-stage 1", 4, id="PP2-VPP2"
    ),
    pytest.param("--tensor-model-parallel-size 2", 4, id="TP2"),
    pytest.param("--context-parallel-size 2", 4, id="CP2"),
]


@pytest.mark.parametrize(("layout", "num_ranks"), LAYOUTS)
def test_the_loss_is_that_of_stock_rows(tmp_path: Path, stock: Recorded, layout: str, num_ranks: int) -> None:
    if layout:
        stock = run(tmp_path / "stock", layout, EVALUATED, num_ranks=num_ranks)
    ours = run(tmp_path / "ours", layout, EVALUATED, BALANCED, num_ranks=num_ranks)
    assert_balanced(ours, stock=stock)
    for of_rank, stocks in zip(evaluations(ours), evaluations(stock), strict=True):
        assert losses(of_rank) == pytest.approx(losses(stocks), rel=1e-6)
    # Training goes on as if nothing had been evaluated.
    assert_equal(training(ours), reference=training(stock))


def test_a_flag_leaves_evaluation_stock(tmp_path: Path, stock: Recorded) -> None:
    ours = run(tmp_path, EVALUATED, BALANCED, "--no-balance-evaluation")
    assert not any(row["microbatch_tokens"] for of_rank in evaluations(ours) for row in of_rank)


class TestSft:
    """Megatron averages means of micro-batches under --sft."""

    @pytest.fixture(scope="class")
    def stock_sft(self, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
        return run(tmp_path_factory.mktemp("stock-sft"), EVALUATED, "--sft")

    def test_by_default_evaluation_stays_stock(self, tmp_path: Path, stock_sft: Recorded) -> None:
        ours = run(tmp_path, EVALUATED, "--sft", BALANCED)
        assert ours.output.count("evaluation is Megatron's own: under --sft its loss is a mean of means") == 1
        for of_rank, stocks in zip(evaluations(ours), evaluations(stock_sft), strict=True):
            assert losses(of_rank) == pytest.approx(losses(stocks), rel=1e-5)
            assert not any(row["microbatch_tokens"] for row in of_rank)
            assert losses(of_rank) != pytest.approx([loss for loss, _ in loss_by_tokens(ours)], rel=1e-3)

    def test_the_flag_has_sums_divided(self, tmp_path: Path, stock_sft: Recorded) -> None:
        ours = run(tmp_path, EVALUATED, "--sft", BALANCED, "--balance-evaluation")
        assert_balanced(ours, stock=stock_sft, sft=True)
