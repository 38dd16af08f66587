"""Figures and page of the benchmark of evaluation; tests/megatron compares losses of real runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from training_run import ROOT

from benchmarks.evaluation.__main__ import SHAPE, busiest_to_mean, loss_difference, report
from benchmarks.evaluation.rows import write_rows
from megatron_balance.cost.model import CostModel

PAGE = ROOT / "benchmarks" / "results" / "evaluation.md"


def test_the_busiest_rank_is_that_of_each_iteration() -> None:
    cost = CostModel.from_shape(SHAPE)
    short, long = cost(10), cost(500)
    ranks = [[[[500], [10]]], [[[10], [500]]]]  # one evaluation of two iterations on two ranks
    assert busiest_to_mean(ranks) == pytest.approx(2 * long / (short + long))
    assert busiest_to_mean([ranks[0], ranks[0]]) == 1


def test_the_largest_difference_of_a_loss() -> None:
    ways = {"stock": {"losses": [2.0, 4.0]}, "balanced": {"losses": [2.0, 4.1]}}
    assert loss_difference(ways) == pytest.approx(0.1 / 4)


def test_rows_have_their_lengths_and_first_tokens(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows", lengths=np.array([3, 7]), seed=0, first_tokens=[11, 12])
    rows = [json.loads(line)["tokens"] for line in path.read_text().splitlines()]
    assert [len(row) for row in rows] == [4, 8]
    assert [row[0] for row in rows] == [11, 12]


def test_the_page_is_that_of_the_committed_figures() -> None:
    result = json.loads(PAGE.with_suffix(".json").read_text())
    assert report(result) == PAGE.read_text()
    assert all(loss_difference(case["ways"]) < 1e-6 for case in result["cases"])
