"""Balanced evaluation has the loss of stock evaluation, by real `pretrain()` runs on the same data."""

from __future__ import annotations

from pathlib import Path

import pytest
from evaluation_runs import BALANCED, GLOBAL_BATCH_SIZE, assert_evaluated_as_stock, evaluations, losses, run
from rounding import assert_equal
from training_run import Recorded

NUM_ITERATIONS = 3
EVALUATED = f"--eval-iters {NUM_ITERATIONS}"


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


@pytest.mark.parametrize(
    ("num_stages", "num_ranks"),
    [pytest.param(3, 6, id="PP3-DP2"), pytest.param(4, 4, marks=pytest.mark.slow, id="PP4")],
)
def test_stages_that_load_no_data(tmp_path: Path, num_stages: int, num_ranks: int) -> None:
    layout = f"--num-layers {num_stages} --pipeline-model-parallel-size {num_stages}"
    stock = run(tmp_path / "stock", layout, EVALUATED, num_ranks=num_ranks)
    ours = run(tmp_path / "ours", layout, EVALUATED, BALANCED, "--no-balance-load-every-stage", num_ranks=num_ranks)
    assert_evaluated_as_stock(ours, stock=stock)
    ranks_of_a_stage = num_ranks // num_stages
    for rank, steps in enumerate(ours.ranks):
        at_an_end = rank // ranks_of_a_stage in (0, num_stages - 1)
        assert {bool(row["first_tokens"]) for row in steps if "evaluation" in row} == {at_an_end}
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
