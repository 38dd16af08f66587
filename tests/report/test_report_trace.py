"""The trace: valid, sorted, no overlap in a track, every micro-batch in it with its samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_runs import run_info, run_record, unmeasured

from megatron_balance import Topology
from megatron_balance.record.run_record import RunRecord
from megatron_balance.report.run_figures import run_figures
from megatron_balance.report.trace import write_trace


def slices(record: RunRecord, path: Path) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """The file, its slices of ranks, its slices of steps."""
    content = json.loads(write_trace(run_figures(record), out=path).read_text())
    events = [event for event in content["traceEvents"] if event["ph"] == "X"]
    return content, [e for e in events if e["pid"] == 1], [e for e in events if e["pid"] == 0]


@pytest.mark.parametrize("is_measured", [True, False])
@pytest.mark.parametrize("topology", [Topology(4), Topology(4, ep_size=2), Topology(4, pp_size=2)])
def test_events_are_sorted_and_do_not_overlap(topology: Topology, is_measured: bool, tmp_path: Path) -> None:
    record = run_record(run_info(topology))
    record = record if is_measured else unmeasured(record)
    content, of_ranks, of_steps = slices(record, tmp_path / "trace.json")
    times = [event["ts"] for event in content["traceEvents"]]
    assert times == sorted(times)
    for tracks in (of_ranks, of_steps):
        ends: dict[int, float] = {}
        for event in tracks:
            assert event["dur"] >= 0
            assert event["ts"] >= ends.get(event["tid"], 0.0) - 1e-6
            ends[event["tid"]] = event["ts"] + event["dur"]
    assert len(of_ranks) == sum(step.cost_grid.size for step in record.steps)
    assert len(of_steps) == len(record.steps)
    names = {e["tid"]: e["args"]["name"] for e in content["traceEvents"] if e["name"] == "thread_name"}
    assert names == {rank: f"rank {rank}" for rank in range(4)}


def test_slices_name_their_samples_and_measured_seconds(tmp_path: Path) -> None:
    record = run_record(num_steps=2)
    _, of_ranks, of_steps = slices(record, tmp_path / "trace.json")
    first = record.steps[0]
    of_first = [event for event in of_ranks if event["ts"] < of_steps[1]["ts"]]
    assert sorted(sample for event in of_first for sample in event["args"]["samples"]) == list(range(48))
    for event in of_first:
        args = event["args"]
        slot = int(event["name"].split()[-1])
        assert args["lengths"] == first.lengths[args["samples"]].tolist()
        assert args["measured_s"] == first.seconds[event["tid"], slot]
        assert event["dur"] == pytest.approx(args["measured_s"] * 1e6, abs=2e-3)
        assert args["cost"] == int(first.cost_grid[event["tid"], slot]) << first.cost_shift
    assert of_steps[0]["args"]["plan_ms"] == pytest.approx(4)


def test_without_seconds_the_mean_step_is_one(tmp_path: Path) -> None:
    content, _, of_steps = slices(unmeasured(run_record()), tmp_path / "trace.json")
    assert np.mean([event["dur"] for event in of_steps]) == pytest.approx(1e6)
    assert content["otherData"]["time"] == "FLOP; the mean step is drawn as one second"
