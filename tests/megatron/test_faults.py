"""Faults in real training runs, rank by rank. `scripts/check_faults.sh` runs all of them; these are the quick ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.faults.cases import FAULTS
from benchmarks.faults.run import Nursery, run_with

pytestmark = pytest.mark.slow

QUICK = (
    "ends-early-tp2",
    "negative-token",
    "other-data-pp2",
    "other-data-cp2",
    "loader-raises-pp2",
    "other-iterator",
    "no-flags-tp2",
    "killed-before-exchange-now",
    "killed-during-exchange",
    "interrupted",
    "exit-signal",
)


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as ranks:
        yield ranks


@pytest.mark.parametrize("name", QUICK)
def test_every_rank_ends_and_says_why(name: str, tmp_path: Path, nursery: Nursery) -> None:
    outcome = run_with(FAULTS[name], folder=tmp_path / "run", nursery=nursery)
    assert not outcome.wrong, "\n\n".join(end.output[-2000:] for end in outcome.ends)
