"""Balanced evaluation of several validation sets, whole ones, and batches of other sizes than those of training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from evaluation_runs import BALANCED, assert_evaluated_as_stock, evaluations, run, samples
from training_run import Recorded

from benchmarks.evaluation.rows import write_rows

SETS = (range(11), range(100, 106))
"""The first tokens of each set's samples; the first set is no multiple of the ranks."""

DP_SIZE = 2


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Flags of a train set and two validation sets."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    train, first, second = (
        write_rows(folder / name, lengths=rng.integers(8, 400, len(firsts)), seed=index, first_tokens=firsts)
        for index, (name, firsts) in enumerate({"train": range(64), "first": SETS[0], "second": SETS[1]}.items())
    )
    return f"--train-data-path {train} --valid-data-path {first} {second}"


WHOLE_SETS = "--full-validation --multiple-validation-sets"


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory, data: str) -> Recorded:
    return run(tmp_path_factory.mktemp("stock"), data, WHOLE_SETS)


LAYOUTS = [
    pytest.param("", 2, id="DP2"),
    pytest.param("--pipeline-model-parallel-size 2", 4, id="PP2"),
    pytest.param("--tensor-model-parallel-size 2", 4, id="TP2"),
    pytest.param("--context-parallel-size 2", 4, id="CP2"),
]


@pytest.mark.parametrize(("layout", "num_ranks"), LAYOUTS)
def test_every_set_has_the_loss_of_stock_rows(
    tmp_path: Path, data: str, stock: Recorded, layout: str, num_ranks: int
) -> None:
    if layout:
        stock = run(tmp_path / "stock", layout, data, WHOLE_SETS, num_ranks=num_ranks)
    ours = run(tmp_path / "ours", layout, data, WHOLE_SETS, BALANCED, num_ranks=num_ranks)
    assert_evaluated_as_stock(ours, stock=stock)
    sets_in_turn = [set(SETS[index % 2]) for index in range(len(evaluations(ours)[0]))]
    assert [set(counts) for counts in samples(ours)] == sets_in_turn


def test_every_sample_is_evaluated_once(tmp_path: Path, data: str) -> None:
    one_row_each = f"{WHOLE_SETS} --eval-global-batch-size {DP_SIZE}"
    stock = run(tmp_path / "stock", data, one_row_each)
    ours = run(tmp_path / "ours", data, one_row_each, BALANCED)
    assert_evaluated_as_stock(ours, stock=stock)
    first, second = samples(ours)[:2]
    assert second == dict.fromkeys(SETS[1], 1)
    # In the last, short batch of the first set Megatron's second rank reads its own first row again.
    assert sorted(first) == list(SETS[0])
    assert sorted(first.values()) == [1] * 10 + [2]


def test_batches_of_evaluation_have_sizes_of_their_own(tmp_path: Path, data: str) -> None:
    size, num_iterations, rows_of_an_item = 16, 2, 4
    evaluated = f"{data} --eval-iters {num_iterations} --eval-global-batch-size {size}"
    stock = run(tmp_path / "stock", evaluated)
    ours = run(tmp_path / "ours", evaluated, f"--eval-micro-batch-size {rows_of_an_item} --balance-data")
    assert_evaluated_as_stock(ours, stock=stock)
    num_rows = size * num_iterations
    for of_rank in evaluations(ours):
        assert all(row["consumed"] == num_rows for row in of_rank)
        assert all(len(row["microbatch_tokens"]) < num_rows // DP_SIZE // 2 for row in of_rank)


def test_a_run_that_only_evaluates(tmp_path: Path, data: str) -> None:
    stock = run(tmp_path / "stock", data, WHOLE_SETS, "--skip-train")
    ours = run(tmp_path / "ours", data, WHOLE_SETS, "--skip-train", BALANCED)
    assert_evaluated_as_stock(ours, stock=stock)
    assert [set(counts) for counts in samples(ours)] == [set(first_tokens) for first_tokens in SETS]
