"""The benchmark of image-text samples: its draws, its ways of planning, and the committed page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.planner import images

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_pictures_become_patches_as_qwen_resizes_them() -> None:
    # 640 by 480 pixels become 644 by 476: 46 by 34 patches.
    assert images.num_patches(640, 480) == 46 * 34
    assert images.num_patches(1, 1) == 4


def test_a_batch_counts_the_tokens_of_its_images() -> None:
    batch = images.draw_batch("documents", num_samples=300, seed=3)
    assert batch.lengths == images.draw_batch("documents", num_samples=300, seed=3).lengths
    assert {len(patches) for patches in batch.image_patches} == {0, 1, 2, 3, 4}
    assert all(length > sum(p) // 4 for length, p in zip(batch.lengths, batch.image_patches, strict=True))


def test_both_parts_plan_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "NUM_BATCHES", 1)
    steps = {row.plan: row.step for row in images.measure("llava", dp_size=8)}
    assert min(steps, key=lambda name: steps[name]) == "FLOPs of both"
    assert steps["tokens"] > 1.01


def test_both_parts_are_even_where_ranks_meet_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "NUM_BATCHES", 1)
    over_bound = {row.plan: row.over_bound for row in images.measure("llava", dp_size=8, meets=True)}
    assert over_bound[images.BOTH] - 1 < (over_bound[f"{images.BOTH}, their sum"] - 1) / 2


def test_the_page_on_images_has_the_figures() -> None:
    page = (RESULTS.parents[1] / "docs" / "images.md").read_text()
    rows = json.loads((RESULTS / "images.json").read_text())["rows"]
    for mixture in images.MIXTURES:
        for ranks in images.RANKS:
            of_plans = {
                row["plan"]: f"{row['over_bound']:.3f}"
                for row in rows
                if row["meets"] and (row["mixture"], row["dp_size"]) == (mixture, ranks)
            }
            ways = ("tokens", f"{images.BOTH}, their sum", images.BOTH)
            assert f"| {mixture}, {ranks} | {' | '.join(of_plans[way] for way in ways)} |" in page


def test_the_page_is_made_from_the_figures() -> None:
    result = json.loads((RESULTS / "images.json").read_text())
    assert images.report(result) == (RESULTS / "images.md").read_text()
