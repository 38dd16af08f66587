"""The benchmark of LLaVAModel: its samples, its costs, and the committed page."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.llava import __main__ as llava
from benchmarks.llava.samples import MIXTURES, cost_model, cost_of, num_tiles, texts

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_pictures_are_cut_into_tiles() -> None:
    # 640 by 480 pixels are covered by 2 by 2 tiles; a page by 4 by 5, of which 12 are allowed; both once more whole.
    assert [num_tiles(640, 480), num_tiles(1700, 2200), num_tiles(448, 448)] == [5, 13, 1]


@pytest.mark.parametrize("mixture", MIXTURES)
def test_samples_have_room_for_their_images(mixture: str) -> None:
    drawn = list(islice(texts(3, mixture=mixture), 200))
    assert drawn == list(islice(texts(3, mixture=mixture), 200))
    assert all(text.num_tokens > len(text.num_tiles) for text in drawn)
    assert 0 < sum(bool(text.num_tiles) for text in drawn) < 200


def test_a_rank_costs_its_tokens_its_tiles_and_its_microbatches() -> None:
    model = cost_model()
    tile = 36 * model.image_linear + 36**2 * model.image_quadratic
    assert cost_of([[10, 7], [30]], [3, 0]) == model(10) + model(7) + model(30) + 3 * tile + 2 * model.per_microbatch


def test_both_parts_are_planned_and_measured_best_where_texts_have_no_images() -> None:
    rows = json.loads((RESULTS / "llava.json").read_text())["rows"]
    for num_ranks in (2, 4):
        of_ways = {
            row["way"]: row for row in rows if (row["mixture"], row["num_ranks"]) == ("code and documents", num_ranks)
        }
        both, tokens = of_ways["FLOPs of both"], of_ways["tokens"]
        assert both["planned"] < 1.01 < tokens["planned"]
        assert both["measured"] < tokens["measured"]
    assert all(row["loss_difference"] < 1e-6 for row in rows)


def test_the_page_is_made_from_the_figures() -> None:
    result = json.loads((RESULTS / "llava.json").read_text())
    assert llava.report(result) == (RESULTS / "llava.md").read_text()
