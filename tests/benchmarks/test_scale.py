"""The growth benchmark measures what it names, and docs/scale.md shows what it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scale import report
from benchmarks.scale.__main__ import EXPOSED_LIMIT, JUDGED
from benchmarks.scale.alone import measure_alone
from benchmarks.scale.samples import SAMPLES_PER_RANK, Samples
from benchmarks.scale.simulated import (
    LAYOUTS,
    Layout,
    Network,
    mesh_value_nbytes,
    open_files,
    simulate_start,
    simulate_step,
)
from benchmarks.scale.stages import STAGES

ROOT = Path(__file__).resolve().parents[2]
RESULT = json.loads((ROOT / "benchmarks" / "results" / "scale.json").read_text())
TABLES = (
    report.measured_table,
    report.stages_table,
    report.alone_table,
    report.simulated_table,
    report.start_table,
    report.mesh_table,
)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.__name__)
def test_the_page_shows_the_figures_of_the_benchmark(table: Any) -> None:
    assert table(RESULT) in (ROOT / "docs" / "scale.md").read_text()


def test_the_results_page_is_made_from_the_figures() -> None:
    assert report.report(RESULT) == (ROOT / "benchmarks" / "results" / "scale.md").read_text()


def test_at_most_half_a_percent_of_a_step_is_exposed() -> None:
    judged = {world["num_ranks"]: world for world in RESULT["worlds"] if world["replica_size"] == 1}
    assert RESULT["lengths"]["real"]
    for num_ranks in JUDGED:
        assert judged[num_ranks]["exposed_seconds"]["p50"] <= EXPOSED_LIMIT * RESULT["step_seconds"]
    assert {one["num_ranks"] for one in RESULT["simulated"]} == {64, 1024, 10_000}
    assert all(one["step"]["exposed_share"] <= EXPOSED_LIMIT for one in RESULT["simulated"])


def test_the_model_follows_from_the_measured_figures() -> None:
    for layout, one in zip(LAYOUTS, RESULT["simulated"], strict=True):
        step = simulate_step(layout, measured=RESULT, network=Network(), step_seconds=RESULT["step_seconds"])
        assert step == pytest.approx(one["step"])
        assert simulate_start(layout, measured=RESULT, step_seconds=RESULT["step_seconds"]) == pytest.approx(
            one["start"]
        )


def test_open_files_are_those_that_ranks_had() -> None:
    for world in RESULT["worlds"]:
        sizes = [size for size in (world["dp_size"], world["replica_size"]) if size > 1]
        planned_elsewhere = world["dp_size"] * SAMPLES_PER_RANK >= 256
        assert world["more_files"] == open_files(sizes) - (not planned_elsewhere)


def test_work_that_a_step_does_not_hide_is_exposed() -> None:
    layout = Layout(10_000, 1)
    hidden = simulate_step(layout, measured=RESULT, network=Network(), step_seconds=60.0)
    short = simulate_step(layout, measured=RESULT, network=Network(), step_seconds=0.1)
    assert short["exposed"] - hidden["exposed"] == pytest.approx(short["all"] - 0.1)
    worse = simulate_step(layout, measured=RESULT, network=Network().worse(4), step_seconds=60.0)
    assert worse["gather"] > 3.9 * hidden["gather"]


def test_one_rank_alone_does_every_stage_at_its_true_size() -> None:
    one = measure_alone(Samples(48, 2, None).lengths())
    assert all(one["cpu_seconds"][stage] > 0 for stage in STAGES)
    assert 1 < one["num_peers"] <= SAMPLES_PER_RANK
    assert one["sent_nbytes"] > 0


@pytest.mark.slow
def test_gloo_reads_from_the_store_as_the_model_says() -> None:
    script = (
        "import json; from benchmarks.scale.startup import mesh; "
        "print(json.dumps([mesh(4, lazy=False), mesh(4, lazy=True)]))"
    )
    path = os.pathsep.join([str(ROOT), str(ROOT / "scripts")])
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True, env=os.environ | {"PYTHONPATH": path}
    )
    at_once, lazy = json.loads(done.stdout.splitlines()[-1])
    assert at_once["reads"] == 4
    assert at_once["read_nbytes"] == 4 * mesh_value_nbytes(4)
    assert at_once["files"] == 4 + 3
    assert lazy["reads"] == 2  # neighbours in the ring
