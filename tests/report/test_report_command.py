"""`megatron-balance report`: from a plan, from a record, from both, and what it says about wrong input."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from report_runs import run_info, run_record

from megatron_balance.cli import main
from megatron_balance.cost.model import CostModel
from megatron_balance.record.plan_file import read_plan
from megatron_balance.record.writers import PlanWriter, SecondsWriter

pytest.importorskip("plotly")


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    lengths, out = tmp_path / "lengths.npy", tmp_path / "plan.json"
    np.save(lengths, np.random.default_rng(0).integers(16, 7000, size=200))
    batch = ["--global-batch-size", "48", "--dp-size", "4", "--max-tokens-per-gpu", "8192"]
    assert main(["plan", str(lengths), *batch, "--model", "Qwen3-8B", "--json", str(out)]) == 0
    return out


@pytest.fixture
def record(tmp_path: Path) -> Path:
    folder = tmp_path / "record"
    plans = PlanWriter(folder, info=run_info())
    ranks = [SecondsWriter(folder, dp_rank=rank) for rank in range(4)]
    for step in run_record().steps:
        plans.add(step)
        for rank, writer in enumerate(ranks):
            writer.add(step.iteration, seconds=step.seconds[rank])
    for writer in (plans, *ranks):
        writer.flush()
    return folder


def test_a_plan_reads_as_it_was_planned(plan: Path) -> None:
    content = json.loads(plan.read_text())
    run = read_plan(plan)
    assert run.info.limits.max_tokens_per_gpu == 8192
    assert (run.info.cost_name, run.info.objective) == ("flops", "step")
    assert run.info.cost_model == CostModel(**{**content["cost_model"], "windows": ()})
    assert len(run.steps) == len(content["steps"]) == 4
    for step, written in zip(run.steps, content["steps"], strict=True):
        assert step.lengths.tolist() == written["lengths"]
        predicted = int(step.cost_grid.sum(axis=1).max()) << step.cost_shift
        assert predicted == written["metrics"]["predicted_cost"]


def test_page_and_trace_of_a_plan(plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    assert main(["report", str(plan), "--out", str(page), "--trace", str(trace)]) == 0
    assert "4 steps" in capsys.readouterr().out
    assert "megatron-balance plan" in page.read_text(encoding="utf-8")
    steps = [event["name"] for event in json.loads(trace.read_text())["traceEvents"] if event["pid"] == 0][1:]
    assert steps == ["step 1", "step 2", "step 3", "step 4"]


def test_a_record_beside_a_plan_and_only_some_steps(record: Path, plan: Path, tmp_path: Path) -> None:
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    flags = ["--out", str(page), "--trace", str(trace), "--iterations", "2:4"]
    assert main(["report", str(record), str(plan), *flags]) == 0
    assert "planned beforehand" in page.read_text(encoding="utf-8")
    steps = [event["name"] for event in json.loads(trace.read_text())["traceEvents"] if event["pid"] == 0][1:]
    assert steps == ["step 2", "step 3"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.json"], "the plan 'missing.json' cannot be read"),
        (["RECORD", "--iterations", "7"], "--iterations is '7': it must be A:B"),
        (["RECORD", "--iterations", "90:"], "the run has steps 1 to 6"),
        (["RECORD", "RECORD"], "give one record, one plan, or one of each"),
        (["RECORD", "--calibration", "missing.json"], "the calibration 'missing.json' cannot be read"),
        (["RECORD/run.json"], "is no plan: make one with megatron-balance plan --json"),
    ],
)
def test_errors_in_one_line(
    record: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", *(argument.replace("RECORD", str(record)) for argument in arguments)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_plan_for_other_ranks_is_refused(record: Path, plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = json.loads(plan.read_text())
    content["topology"]["dp_size"] = 8
    for step in content["steps"]:
        step["ranks"] += [[[] for _ in range(step["num_microbatches"])] for _ in range(4)]
    plan.write_text(json.dumps(content))
    assert main(["report", str(record), str(plan)]) == 2
    assert "the plan is for --dp-size 8, the run had 4" in capsys.readouterr().err


def test_a_damaged_plan_is_named(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = json.loads(plan.read_text())
    content["steps"][0]["ranks"][0][0] = []
    plan.write_text(json.dumps(content))
    assert main(["report", str(plan)]) == 2
    assert "has no rank" in capsys.readouterr().err
