"""The equality matrix reports what it must: a wrong run differs, a failed one is shown, none is missing unseen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from rounding import ALLOWANCES, assert_equal
from training_run import Recorded, command_of

from benchmarks.equality.cases import (
    AS_CHOSEN,
    LAYOUTS,
    LOOK_AHEAD,
    NUM_STEPS,
    OPTIMIZERS,
    POLICIES,
    PRECISIONS,
    SEED,
    SEQ_LENGTH,
    SHUFFLED,
    STOCK,
    Case,
    cases,
)
from benchmarks.equality.outcomes import Outcome, OutcomeFile, difference, outcome_of
from benchmarks.equality.report import Report
from benchmarks.equality.rows import NUM_ROWS, chosen, shuffled_within_steps, write_rows
from megatron_balance.devkit.sft_dataset import SftDataset, SftSample, jsonl_samples

ROOT = Path(__file__).resolve().parents[2]
CELL = ("DP2", "fp32", "plain")
STOCK_CASE, SHUFFLED_CASE, BY_FLOPS = (Case(*CELL, way) for way in (STOCK, SHUFFLED, "by FLOPs"))
LOSSES = np.linspace(5.0, 4.0, NUM_STEPS)


def outcome(case: Case, *, off: float = 0.0, error: str | None = None) -> Outcome:
    """As stock, but for the last step's loss."""
    losses = [*LOSSES[:-1].tolist(), float(LOSSES[-1] * (1 + off))]
    return Outcome(case, "abc", losses=losses, grad_norms=[1.0 + off] * NUM_STEPS, error=error)


def report_of(*outcomes: Outcome) -> Report:
    return Report([STOCK_CASE, SHUFFLED_CASE, BY_FLOPS], {one.case: one for one in outcomes})


def rows() -> list[SftSample]:
    lengths = range(SEQ_LENGTH - NUM_ROWS + 1, SEQ_LENGTH + 1)
    return [SftSample(np.full(length + 1, length % 250), np.arange(length + 1) > 3) for length in lengths]


def test_the_whole_matrix_has_every_policy_in_every_cell_after_its_stock_run() -> None:
    whole = cases(whole=True)
    assert len(whole) == len(set(whole))
    of_matrix = [case for case in whole if case.layout in LAYOUTS and case.way in POLICIES]
    assert len(of_matrix) == len(LAYOUTS) * len(PRECISIONS) * len(OPTIMIZERS) * len(POLICIES)
    for position, case in enumerate(whole):
        assert case.way in (STOCK, LOOK_AHEAD) or case.reference in whole[:position]
    assert set(cases(whole=False)) < set(whole)


def test_look_ahead_is_compared_with_stock_on_the_rows_it_chose() -> None:
    assert Case(*CELL, LOOK_AHEAD).reference == Case(*CELL, AS_CHOSEN)
    assert Case(*CELL, AS_CHOSEN).flags == STOCK_CASE.flags


def test_training_reads_rows_in_the_order_that_was_asked_for(tmp_path: Path) -> None:
    order = shuffled_within_steps()
    assert order != sorted(order)
    write_rows(tmp_path / "rows.jsonl", rows(), order=order)
    dataset = SftDataset(
        jsonl_samples(tmp_path / "rows.jsonl", None),
        num_samples=NUM_ROWS,
        seq_length=SEQ_LENGTH,
        pad_to_seq_length=False,
        pad_token=0,
        seed=SEED,
    )
    assert [dataset.length(index) for index in range(NUM_ROWS)] == [rows()[row].tokens.size - 1 for row in order]


def test_shuffling_keeps_every_row_in_its_step() -> None:
    steps = np.array(shuffled_within_steps()).reshape(NUM_STEPS, -1)
    assert np.array_equal(np.sort(steps, axis=1), np.arange(NUM_ROWS).reshape(NUM_STEPS, -1))


def test_a_row_that_look_ahead_took_twice_is_noticed() -> None:
    lengths = [row.tokens.size - 1 for row in rows()]
    assert chosen([lengths[::-1]], rows=rows()) == list(range(NUM_ROWS))[::-1]
    with pytest.raises(AssertionError, match="lost a row or took one twice"):
        chosen([[*lengths[:-1], lengths[0]]], rows=rows())


def test_a_run_that_differs_by_more_than_other_stock_runs_is_not_equal() -> None:
    assert report_of(outcome(STOCK_CASE), outcome(SHUFFLED_CASE, off=1e-7), outcome(BY_FLOPS, off=2e-7)).is_good
    report = report_of(outcome(STOCK_CASE), outcome(SHUFFLED_CASE, off=1e-7), outcome(BY_FLOPS, off=1e-5))
    assert not report.is_good
    assert "1, **1 not equal**" in report.page()
    assert "by FLOPs: differs: loss 1.0e-05" in report.summary()


def test_rounding_that_stock_runs_happened_not_to_show_is_allowed() -> None:
    assert report_of(outcome(STOCK_CASE), outcome(SHUFFLED_CASE), outcome(BY_FLOPS, off=1e-6)).is_good


@pytest.mark.parametrize("key", ["lm_loss", "grad_norm"])
def test_an_error_of_a_hundred_thousandth_is_no_rounding(key: str) -> None:
    steps = [{"lm_loss": float(loss), "grad_norm": 1.0} for loss in LOSSES]
    off = [*steps[:-1], steps[-1] | {key: steps[-1][key] * (1 + 1e-5)}]
    ulp_off = [*steps[:-1], steps[-1] | {key: steps[-1][key] * (1 + 2**-21)}]
    assert_equal(Recorded([ulp_off], ""), reference=Recorded([steps], ""))
    with pytest.raises(AssertionError, match=f"{key} differs by 1.00e-05"):
        assert_equal(Recorded([off], ""), reference=Recorded([steps], ""))
    with pytest.raises(AssertionError, match="7 steps, not 8"):
        assert_equal(Recorded([steps[1:]], ""), reference=Recorded([steps], ""))


def test_a_run_that_failed_or_is_missing_is_shown() -> None:
    failed = report_of(outcome(STOCK_CASE), outcome(SHUFFLED_CASE, off=1e-7), outcome(BY_FLOPS, error="rank 1 died"))
    assert not failed.is_good
    assert "1, **1 not equal**" in failed.page()
    assert "by FLOPs | failed: rank 1 died" in failed.every_run()
    missing = report_of(outcome(STOCK_CASE), outcome(SHUFFLED_CASE, off=1e-7))
    assert not missing.is_good
    assert "1 more are part of the command and not run yet" in missing.page()
    assert json.loads(missing.json())["largest_of_stock"]["fp32"]["loss"] == pytest.approx(1e-7)


def test_a_run_that_was_not_balanced_failed() -> None:
    steps = [{"lm_loss": 1.0, "grad_norm": 1.0, "ranks": [[[0]]], "lengths": [3]} for _ in range(NUM_STEPS)]
    assert outcome_of(BY_FLOPS, Recorded([steps], ""), revision="abc").error is None
    del steps[2]["ranks"]
    assert outcome_of(BY_FLOPS, Recorded([steps], ""), revision="abc").error == "7 of 8 steps were balanced"
    steps[3]["grad_norm"] = float("nan")
    assert "8 finite ones were expected" in str(outcome_of(BY_FLOPS, Recorded([steps], ""), revision="abc").error)


def test_outcomes_are_kept_and_the_newest_counts(tmp_path: Path) -> None:
    kept = OutcomeFile(tmp_path / "runs.jsonl")
    kept.add(outcome(BY_FLOPS, error="died"))
    assert not OutcomeFile(tmp_path / "runs.jsonl").is_done(BY_FLOPS)
    kept.add(outcome(BY_FLOPS))
    again = OutcomeFile(tmp_path / "runs.jsonl")
    assert again.is_done(BY_FLOPS)
    assert Counter(case.way for case in again.outcomes) == {"by FLOPs": 1}
    assert difference(again.outcomes[BY_FLOPS], reference=outcome(STOCK_CASE)) == difference(
        outcome(BY_FLOPS), reference=outcome(STOCK_CASE)
    )


def test_runs_on_gpus_go_over_nccl_without_the_cpu_kit(tmp_path: Path) -> None:
    on_cpu, on_gpu = (command_of(tmp_path, ["--bf16"], num_ranks=2, device=device) for device in ("cpu", "cuda"))
    assert "--cpu" in on_cpu
    assert "gloo" in on_cpu
    assert not {"--cpu", "gloo", "--spec"} & set(on_gpu)
    assert on_gpu[on_gpu.index("--distributed-backend") + 1] == "nccl"
    assert on_gpu[-1] == on_cpu[-1] == "--bf16"


@pytest.mark.slow
def test_the_command_trains_with_look_ahead_and_with_its_rows_in_turn(tmp_path: Path) -> None:
    """Four real runs on two ranks: stock, shuffled, look-ahead, and stock on the rows that look-ahead chose."""
    command = ["scripts/equality_matrix.sh", "--only", "DP2 / fp32 / plain / look-ahead", "--folder", str(tmp_path)]
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("4 runs: 0 failed, 0 differ by more than rounding.\n")
    kept = OutcomeFile(tmp_path / "runs.jsonl").outcomes
    ahead, as_chosen, stock = (kept[Case(*CELL, way)] for way in (LOOK_AHEAD, AS_CHOSEN, STOCK))
    assert difference(ahead, reference=as_chosen).loss <= ALLOWANCES["fp32"].loss
    assert difference(ahead, reference=stock).loss > 1e-4
