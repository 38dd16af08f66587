"""Faults that would be silent for a model family end the run on every rank; docs/models.md names what is trained."""

from __future__ import annotations

from pathlib import Path

import pytest
from kept_runs import KeptRuns
from table import BY_FLOPS, FAMILY_ROWS, KERNELS


@pytest.mark.parametrize(
    ("family", "fault", "message"),
    [
        ("Nemotron-3-Nano", "families:sequences_not_told_apart", "PackedSeqParams.seq_idx is none"),
        ("Qwen3-VL", "families:positions_cut_short", "position_ids has shape [1, 3, "),
    ],
)
@pytest.mark.xdist_group("DP2")
def test_a_fault_ends_every_rank(train: KeptRuns, family: str, fault: str, message: str) -> None:
    row = next(row for row in FAMILY_ROWS if row.model == family)
    failed = train(
        f"{row.stock} {BY_FLOPS}", stand_ins=(*row.stand_ins, (fault, {})), leave_out=row.without, fails=True
    )
    for of_rank in failed.rows:
        assert [event["kind"] for event in of_rank] == ["error"]
        assert message in of_rank[0]["text"]


def test_mamba_layers_without_balancing_are_left_as_they_are(train: KeptRuns) -> None:
    row = next(row for row in FAMILY_ROWS if row.model == "Nemotron-3-Nano")
    leaking = train(row.stock, stand_ins=(*KERNELS, ("families:sequences_not_told_apart", {})), leave_out=row.without)
    assert len(leaking.steps) == 3


def test_the_page_names_what_is_trained() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    lines = page.split("## What is trained")[1].split("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")][1:]
    trained: dict[str, list[str]] = {}
    for row in FAMILY_ROWS:
        trained.setdefault(row.model, []).append(row.layout)
    assert {name: layouts.split(", ") for name, layouts, _ in rows} == {
        name: list(dict.fromkeys(layouts)) for name, layouts in trained.items()
    }
