"""Plans and records of someone else's: each ends in one line and exit status 2, or in a page that runs none of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded_runs import run_info, write_record

from megatron_balance import Topology
from megatron_balance.cli import main

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


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    assert main(["compare", "synthetic:gsm8k_sft:8", *FLAGS, "--policy", "balance-data", "--json", str(path)]) == 0
    return path


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("topology",), 5),
        (("topology", "dp_size"), 10**12),
        (("topology", "extra"), 1),
        (("cost_model", "linear"), 1.5),
        (("cost_model", "windows"), [[1, 2, 3]]),
        (("steps",), []),
        (("steps", 0, "num_microbatches"), 10**12),
        (("steps", 0, "num_microbatches"), float("inf")),
        (("steps", 0, "lengths", 0), -5),
        (("steps", 0, "lengths", 0), 2**70),
        (("steps", 0, "ranks", 0, 0), [10**9]),
        (("steps", 0, "ranks", 0, 0), "ab"),
        (("steps", 0, "ranks", 0, 0), []),
        (("steps", 0, "ranks"), [[]]),
        (("steps", 0, "metrics", "objective"), "none"),
    ],
)
def test_plan(where: tuple[Any, ...], value: Any, plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan.write_text(json.dumps(spoil(json.loads(plan.read_text()), where, value)))
    refused(capsys, "report", str(plan), "--out", str(plan.with_suffix(".html")))


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """As a training run writes it: two steps of two ranks, measured."""
    write_record(tmp_path / "record", run_info(Topology(2)), num_steps=2, num_samples=6)
    assert main(["report", str(tmp_path / "record"), "--out", str(tmp_path / "page.html")]) == 0
    return tmp_path / "record"


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
        (("__class__",), "os.system"),
    ],
)
def test_run_json(where: tuple[Any, ...], value: Any, record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = record / "run.json"
    path.write_text(json.dumps(spoil(json.loads(path.read_text()), where, value)))
    refused(capsys, "report", str(record), "--out", str(record / "page.html"))


@pytest.mark.parametrize(
    ("file", "name", "value"),
    [
        ("plans", "slot_of", np.full(12, 10**9)),
        ("plans", "slot_of", np.zeros(3, dtype=np.int64)),
        ("plans", "home_ranks", np.full(12, 7)),
        ("plans", "num_segments", np.full(12, 10**15)),
        ("plans", "segment_lengths", np.full(12, -1)),
        ("plans", "segment_lengths", np.full(12, np.nan)),
        ("plans", "num_samples", np.array([10**12, 6])),
        ("plans", "num_microbatches", np.array([10**12, 1])),
        ("plans", "dp_size", np.array([10**12, 1])),
        ("plans", "cost_shift", np.array([10**9, 0])),
        ("plans", "cost_model", np.array([DEEP, DEEP])),
        ("plans", "plan_seconds", np.array([np.nan, np.inf])),
        ("plans", "iteration", np.array([{}, {}])),
        ("seconds", "seconds", np.array(["a", "b"])),
        ("seconds", "seconds", np.full(100, -1.0)),
        ("seconds", "num_microbatches", np.array([10**12, 10**12])),
        ("seconds", "iteration", np.zeros(0)),
    ],
)
def test_arrays_of_a_record(file: str, name: str, value: Any, record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = sorted(record.glob(f"{file}_*.npz"))[0]
    with np.load(path) as chunk:
        arrays = dict(chunk)
    np.savez(path, **{**arrays, name: value}, allow_pickle=True)
    assert path.name in refused(capsys, "report", str(record), "--out", str(record / "page.html"))


def test_texts_of_a_record_stay_texts_in_the_page(record: Path) -> None:
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
