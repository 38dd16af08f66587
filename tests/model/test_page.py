"""docs/models.md says what is read, refused and preset, as the data have it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_balance import BalanceError, CostModel, ModelShape
from megatron_balance.model import FAMILIES, PRESETS, ROWS, num_parameters

PAGE = (Path(__file__).parent.parent.parent / "docs" / "models.md").read_text(encoding="utf-8")


def names(after: str, before: str) -> list[str]:
    return re.findall(r"`([^`]+)`", PAGE.split(after)[1].split(before)[0])


def rows(heading: str) -> list[list[str]]:
    table = PAGE.split(heading)[1].split("\n\n")[0]
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("| ")
    ]


def test_every_family_has_a_cost_by_its_preset() -> None:
    for family, _, preset in rows("\n| family"):
        assert CostModel.from_shape(ModelShape.preset(preset)).linear > 0, family
    kinds = {layer.mixer for *_, preset in rows("\n| family") for layer in ModelShape.preset(preset).decoder_layers()}
    assert kinds == {"attention", "mla", "dsa", "gated_delta_net", "mamba", None}


def test_known_and_refused_types_are_those_of_the_reader() -> None:
    assert names("configs.json`).", "Another type") == sorted(FAMILIES)
    for refused in names("record.", "So is any file"):
        with pytest.raises(BalanceError, match="FLOPs are not known"):
            ModelShape.from_hf_config({**PRESETS["Qwen3-8B"], "model_type": refused})
    for key in names("one of these keys:", "## Presets"):
        with pytest.raises(BalanceError, match="FLOPs are not known"):
            ModelShape.from_hf_config({**PRESETS["Qwen3-8B"], "model_type": "new", key: 1})


def test_presets_are_those_of_the_package() -> None:
    for (name, read, published, source), (expected, row) in zip(rows("\n| preset"), ROWS.items(), strict=True):
        tied = row["config"].get("tie_word_embeddings", False)
        assert (name, source) == (expected, row["source"])
        assert read == f"{num_parameters(ModelShape.preset(name), tied=tied) / 1e9:.2f}"
        assert published == f"{row['parameters'] / 1e9:.2f}, {row['published']}"
