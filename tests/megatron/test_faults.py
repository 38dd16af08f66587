"""Faults in real training runs, rank by rank. `scripts/bench faults` runs all of them; these are the quick ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked_runs import call

pytestmark = pytest.mark.slow

QUICK = (
    "ends-early-tp2",
    "negative-token",
    "other-data-pp2",
    "other-data-cp2",
    "loader-raises-pp2",
    "planner-killed",
    "planner-killed-now",
    "other-iterator",
    "no-flags-tp2",
    "killed-before-exchange-now",
    "killed-during-exchange",
    "interrupted",
    "exit-signal",
)


@pytest.mark.parametrize("name", QUICK)
def test_every_rank_ends_and_says_why(name: str, tmp_path: Path) -> None:
    problems = call("benchmarks.faults.run:problems_with", name, folder=str(tmp_path / "run"))
    assert not problems, "\n\n".join(problems)
