"""Recorded runs that evaluate: their flags, and the figures of each evaluation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from forked_runs import train
from training_run import Recorded

GLOBAL_BATCH_SIZE = 8
FLAGS = (
    "--hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64 --num-layers 2 "
    "--seq-length 512 --max-position-embeddings 512 --train-iters 4 --eval-interval 2 "
    f"--global-batch-size {GLOBAL_BATCH_SIZE}"
)
BALANCED = "--use-dynamic-batch-size --max-tokens-per-gpu 1024 --balance-data --balance-by-flops"


def run(folder: Path, *flags: str, num_ranks: int = 2) -> Recorded:
    return train(
        folder, " ".join((FLAGS, *flags)).split(), num_ranks=num_ranks, module="benchmarks.evaluation.recorded"
    )


def evaluations(recorded: Recorded) -> list[list[dict[str, Any]]]:
    """Each rank's, of ranks that know the loss."""
    rows = [[row for row in steps if "evaluation" in row] for steps in recorded.ranks]
    return [of_rank for of_rank in rows if of_rank[0]["evaluation"]]


def losses(of_rank: list[dict[str, Any]]) -> list[float]:
    return [row["evaluation"]["lm loss"] for row in of_rank]


def samples(recorded: Recorded) -> list[Mapping[int, int]]:
    """Of every evaluation the samples that all ranks ran together, by first token, and the number of times."""
    return [
        sum((Counter(row["first_tokens"]) for row in of_ranks), Counter())
        for of_ranks in zip(*evaluations(recorded), strict=True)
    ]


def assert_evaluated_as_stock(ours: Recorded, *, stock: Recorded) -> None:
    """The same loss, iterations, consumed samples and rows, and every evaluation is balanced."""
    assert samples(ours) == samples(stock)
    for of_rank, stocks in zip(evaluations(ours), evaluations(stock), strict=True):
        assert losses(of_rank) == pytest.approx(losses(stocks), rel=1e-6)
        assert all(row["microbatch_tokens"] for row in of_rank)
        assert not any(row["microbatch_tokens"] for row in stocks)
        for figure in ("consumed", "sft"):
            assert [row[figure] for row in of_rank] == [row[figure] for row in stocks]
        assert [len(row["sums"]) for row in of_rank] == [len(row["sums"]) for row in stocks]
