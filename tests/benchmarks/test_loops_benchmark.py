"""The benchmarks of other loops: Megatron's packing and dealing out, a run on padded rows, and the committed pages."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.loops import rl_bins, unpad

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def test_bins_are_filled_the_longest_first() -> None:
    assert rl_bins.pack([100, 8000, 93, 5000]) == [[8000], [5000, 100, 93]]
    assert [len(of_bin) for of_bin in rl_bins.pack([1] * 120)] == [50, 50, 20]


def test_the_first_ranks_have_one_bin_more() -> None:
    costs = [1, 2, 4, 8, 16]
    assert rl_bins.loads(costs, dp_size=2, in_turns=False).tolist() == [7, 24]
    assert rl_bins.loads(costs, dp_size=2, in_turns=True).tolist() == [21, 10]


def test_our_order_has_the_smaller_imbalance() -> None:
    rollouts = [[8000 // (1 + index // 8) for index in range(64)]]
    figures = rl_bins.measured(rollouts, dp_size=4, in_turns=False)
    assert 1 <= figures["balanced"] < figures["stock"]


@pytest.mark.slow
def test_packs_have_the_losses_of_padded_rows(tmp_path: Path) -> None:
    command = [str(ROOT / "scripts" / "bench_loops.sh"), "unpad", "--synthetic", "--steps", "2", "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    result = json.loads((tmp_path / "unpad.json").read_text())
    assert list(result["sets"]) == list(unpad.LENGTH_SETS)
    for of_set in result["sets"].values():
        assert of_set["real_tokens"] < 0.6
        for figures in of_set["ways"].values():
            assert figures["losses"] == pytest.approx(of_set["ways"]["padded"]["losses"], rel=1e-6)


@pytest.mark.parametrize(("name", "report"), [("unpad", unpad.report), ("rl_bins", rl_bins.report)])
def test_the_pages_are_made_from_the_figures(name: str, report: object) -> None:
    assert callable(report)
    assert report(json.loads((RESULTS / f"{name}.json").read_text())) == (RESULTS / f"{name}.md").read_text()
