"""The comparison of ways to exchange, agree and plan measures what it names, and the docs show what it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scale import exchanges

ROOT = Path(__file__).resolve().parents[2]
RESULT = json.loads((ROOT / "benchmarks" / "results" / "exchanges.json").read_text())
NUM_RANKS = 4


@pytest.mark.parametrize("table", [exchanges.ways_table, exchanges.met_table], ids=lambda table: table.__name__)
def test_the_page_shows_the_figures_of_the_benchmark(table: Any) -> None:
    assert table(RESULT) in (ROOT / "docs" / "scale.md").read_text()


def test_the_results_page_is_made_from_the_figures() -> None:
    assert exchanges.report(RESULT) == (ROOT / "benchmarks" / "results" / "exchanges.md").read_text()
    assert not list(exchanges.problems_of(RESULT))


def test_more_ranks_are_met_with_every_step() -> None:
    met = exchanges.ranks_met(64, lengths_folder=None)
    assert len(met) == len(exchanges.SHOWN_STEPS)
    assert 2 < met[0] < met[1] < met[2] <= met[3] <= 63


@pytest.mark.slow
def test_ways_are_measured_on_ranks(tmp_path: Path) -> None:
    script = f"""
import functools, json
from pathlib import Path
from benchmarks.scale import exchanges, one_planner
from benchmarks.scale.gloo_world import run_ranks
one_planner.NUM_SAMPLES, one_planner.DP_SIZE = 2048, 32
run = functools.partial(run_ranks, {NUM_RANKS}, out=Path({str(tmp_path)!r}) / "ranks")
world = exchanges.summary(run(work=functools.partial(exchanges.compare, 3, lengths_folder=None)))
plans = one_planner.summary(run(work=functools.partial(one_planner.plan_in_both_ways, lengths_folder=None)))
print(json.dumps([world, plans]))
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts")])}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=True, env=environment
    )
    world, plans = json.loads(done.stdout.splitlines()[-1])
    assert not list(exchanges.problems_of({"worlds": {"4": world}}))
    assert 0 < world["num_peers"] <= NUM_RANKS - 1
    assert set(world["ways"]) == {*exchanges.EXCHANGES, *exchanges.AGREEMENTS}
    assert all(way[when]["seconds"] > 0 for way in world["ways"].values() for when in ("first", "later"))
    assert plans["each"]["cpu_seconds"] > 0
    assert 0 < plans["broadcast"]["seconds"] < plans["one"]["seconds"]
