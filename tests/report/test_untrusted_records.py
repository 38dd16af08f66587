"""Records of someone else's: each ends in one line and exit status 2, or in a page that runs none of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import run_info, write_record

from megatron_balance import Topology
from megatron_balance.cli import main

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
def record(tmp_path: Path) -> Path:
    """As a training run writes it: two steps of two ranks, measured."""
    write_record(tmp_path / "record", run_info(Topology(2)), num_steps=2, num_samples=6)
    assert main(["report", str(tmp_path / "record"), "--out", str(tmp_path / "page.html")]) == 0
    return tmp_path / "record"


@pytest.mark.parametrize(
    ("file", "number", "where", "value"),
    [
        *(
            ("plan", 0, where, value)
            for where, value in [
                ((), []),
                (("kind",), "ran"),
                (("format",), "another"),
                (("topology",), [2]),
                (("topology",), 5),
                (("topology", "dp_size"), 10**12),
                (("topology", "dp_size"), 3),
                (("topology", "extra"), 1),
                (("limits", "max_tokens_per_gpu"), "many"),
                (("cost_model",), None),
                (("cost_model", "linear"), 1.5),
                (("cost_model", "windows"), [[1, 2, 3]]),
                (("objective",), ["step"]),
                (("objective",), "</script>"),
                (("origin",), "here"),
            ]
        ),
        *(
            ("plan", 1, where, value)
            for where, value in [
                ((), 7),
                (("slot_of",), [10**9] * 6),
                (("slot_of",), [0, 0]),
                (("slot_of",), "ab"),
                (("home_ranks",), [7] * 6),
                (("home_ranks",), [[0] * 6]),
                (("num_segments",), [10**15] * 6),
                (("segment_lengths", 0), -1),
                (("segment_lengths", 0), 2**70),
                (("segment_lengths", 0), float("nan")),
                (("segment_lengths", 0), 1.5),
                (("num_microbatches",), 10**12),
                (("num_microbatches",), float("inf")),
                (("cost_grid",), []),
                (("cost_shift",), 10**9),
                (("cost_model",), DEEP),
                (("plan_seconds",), float("inf")),
                (("plan_seconds",), None),
                (("iteration",), {}),
                (("cp_sizes",), [1, 1]),
            ]
        ),
        *(
            ("seconds_rank00001", 0, where, value)
            for where, value in [
                (("seconds",), ["a", "b"]),
                (("seconds", 0), -1.0),
                (("seconds", 0), float("inf")),
                (("seconds",), [[1.0]]),
                (("rank",), "1"),
                (("rank",), -1),
                (("iteration",), [1]),
            ]
        ),
    ],
)
def test_lines_of_a_record(
    file: str, number: int, where: tuple[Any, ...], value: Any, record: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = record / f"{file}.jsonl"
    lines = path.read_text().splitlines()
    lines[number] = json.dumps(spoil(json.loads(lines[number]), where, value))
    path.write_text("\n".join(lines) + "\n")
    assert str(record) in refused(capsys, "report", str(record), "--out", str(record / "page.html"))


def test_texts_of_a_record_stay_texts_in_the_page(record: Path) -> None:
    pytest.importorskip("plotly")
    path = record / "plan.jsonl"
    harm = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'"
    first, *others = path.read_text().splitlines()
    content = json.loads(first)
    content["policy"] = content["cost_name"] = harm
    content["origin"] = {"device": harm, "clock": harm, "versions": {harm: harm}}
    path.write_text("\n".join([json.dumps(content), *others]) + "\n")
    out = record / "page.html"
    assert main(["report", str(record), "--out", str(out)]) == 0
    page = out.read_text()
    assert "alert(1)" in page
    assert "<script>alert" not in page
    assert "<img src=x" not in page
