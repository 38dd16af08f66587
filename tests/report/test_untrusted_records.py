"""Plans and records of someone else's: each ends in one line and exit status 2, or in a page that runs none of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_runs import run_info, run_record

from megatron_balance import Topology
from megatron_balance.cli import main
from megatron_balance.record.run_record import read_record
from megatron_balance.record.writers import PlanWriter, SecondsWriter

FLAGS = ["--global-batch-size", "4", "--dp-size", "2", "--max-tokens-per-gpu", "2048"]
DEEP = "[" * 100_000


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that a command says where it ends with status 2."""
    capsys.readouterr()
    assert main([*words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("megatron-balance: ")
    return line


def spoil(content: Any, where: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value at a place."""
    if not where:
        return value
    if isinstance(content, dict):
        return {**content, where[0]: spoil(content.get(where[0]), where[1:], value)}
    copied = list(content)
    copied[where[0]] = spoil(copied[where[0]], where[1:], value)
    return copied


class TestPlansAndRecords:
    @pytest.fixture
    def plan(self, tmp_path: Path) -> Path:
        path = tmp_path / "plan.json"
        assert main(["plan", "synthetic:gsm8k_sft:8", *FLAGS, "--json", str(path)]) == 0
        return path

    @pytest.mark.parametrize(
        ("where", "value"),
        [
            (("topology",), 5),
            (("topology", "dp_size"), 10**12),
            (("topology", "dp_size"), "2"),
            (("topology", "extra"), 1),
            (("limits",), {}),
            (("cost_model", "linear"), 1.5),
            (("cost_model", "windows"), [[1, 2, 3]]),
            (("cost_model", "windows"), [["a", "b"]]),
            (("steps",), {}),
            (("steps",), []),
            (("steps", 0), None),
            (("steps", 0, "num_microbatches"), 10**12),
            (("steps", 0, "num_microbatches"), float("inf")),
            (("steps", 0, "num_microbatches"), -1),
            (("steps", 0, "lengths", 0), -5),
            (("steps", 0, "lengths", 0), 2**70),
            (("steps", 0, "lengths", 0), "5"),
            (("steps", 0, "ranks", 0, 0), [10**9]),
            (("steps", 0, "ranks", 0, 0), [-1]),
            (("steps", 0, "ranks", 0, 0), "ab"),
            (("steps", 0, "ranks"), [[]]),
            (("steps", 0, "metrics", "objective"), "none"),
            (("steps", 0, "metrics"), 3),
        ],
    )
    def test_plan(self, where: tuple[Any, ...], value: Any, plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
        plan.write_text(json.dumps(spoil(json.loads(plan.read_text()), where, value)))
        refused(capsys, "report", str(plan), "--out", str(plan.with_suffix(".html")))

    @pytest.fixture
    def record(self, tmp_path: Path) -> Path:
        """As a training run writes it: two steps of two ranks, measured."""
        run = run_record(run_info(Topology(2)), num_steps=2, num_samples=6)
        folder = tmp_path / "record"
        plans = PlanWriter(folder, info=run.info)
        writers = [SecondsWriter(folder, dp_rank=rank) for rank in range(2)]
        for step in run.steps:
            plans.add(step)
            for rank, writer in enumerate(writers):
                writer.add(step.iteration, seconds=step.seconds[rank])
        for one in (plans, *writers):
            one.flush()
        assert len(read_record(folder).steps) == 2
        return folder

    @pytest.mark.parametrize(
        ("where", "value"),
        [
            ((), []),
            (("topology",), [2]),
            (("topology", "dp_size"), 3),
            (("limits", "max_tokens_per_gpu"), "many"),
            (("cost_model",), None),
            (("objective",), ["step"]),
            (("objective",), "</script>"),
            (("origin",), "here"),
            (("origin", "versions"), 3),
            (("__class__",), "os.system"),
        ],
    )
    def test_run_json(
        self, where: tuple[Any, ...], value: Any, record: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = record / "run.json"
        path.write_text(json.dumps(spoil(json.loads(path.read_text()), where, value)))
        refused(capsys, "report", str(record), "--out", str(record / "page.html"))

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("slot_of", np.full(12, 10**9)),
            ("slot_of", np.full(12, -1)),
            ("slot_of", np.zeros(3, dtype=np.int64)),
            ("home_ranks", np.full(12, 7)),
            ("num_segments", np.full(12, 10**15)),
            ("num_segments", np.full(12, -1)),
            ("segment_lengths", np.full(12, -1)),
            ("segment_lengths", np.full(12, np.nan)),
            ("num_samples", np.array([10**12, 6])),
            ("num_microbatches", np.array([10**12, 1])),
            ("dp_size", np.array([10**12, 1])),
            ("dp_size", np.array(["2", "2"])),
            ("cost_shift", np.array([10**9, 0])),
            ("cost_model", np.array([DEEP, DEEP])),
            ("cost_model", np.array(["[]", "[]"])),
            ("plan_seconds", np.array([np.nan, np.inf])),
            ("iteration", np.array([{}, {}])),
        ],
    )
    def test_plans_of_a_record(self, name: str, value: Any, record: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (path,) = record.glob("plans_*.npz")
        with np.load(path) as chunk:
            arrays = dict(chunk)
        np.savez(path, **{**arrays, name: value}, allow_pickle=True)
        assert path.name in refused(capsys, "report", str(record), "--out", str(record / "page.html"))

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("seconds", np.array(["a", "b"])),
            ("seconds", np.full(100, -1.0)),
            ("num_microbatches", np.array([10**12, 10**12])),
            ("iteration", np.zeros(0)),
        ],
    )
    def test_seconds_of_a_record(self, name: str, value: Any, record: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = sorted(record.glob("seconds_*.npz"))[0]
        with np.load(path) as chunk:
            arrays = dict(chunk)
        np.savez(path, **{**arrays, name: value})
        assert path.name in refused(capsys, "report", str(record), "--out", str(record / "page.html"))

    def test_texts_of_a_record_stay_texts_in_the_page(self, record: Path) -> None:
        pytest.importorskip("plotly")
        path = record / "run.json"
        harm = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'"
        content = json.loads(path.read_text())
        content["policy"] = content["cost_name"] = harm
        content["origin"] = {"device": harm, "clock": harm, "versions": {harm: harm}}
        path.write_text(json.dumps(content))
        out = record / "page.html"
        assert main(["report", str(record), "--out", str(out)]) == 0
        page = out.read_text()
        assert "alert(1)" in page
        assert "<script>alert" not in page
        assert "<img src=x" not in page
