"""`megatron-balance plan` and `compare` on files whose samples have images, which the model's vision encoder runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_balance import CostModel, ModelShape
from megatron_balance.cli import main
from megatron_balance.cli.comparison.batches import GlobalBatch, look_ahead
from megatron_balance.cli.comparison.image_file import read_image_patches
from megatron_balance.cost.model import MICROBATCH_TOKENS
from megatron_balance.errors import BalanceError
from megatron_balance.topology import Topology

MODEL = "Qwen2.5-VL-7B"
COST = CostModel.from_shape(ModelShape.preset(MODEL), microbatch_tokens=MICROBATCH_TOKENS)
SAMPLES: list[dict[str, Any]] = [
    {"length": 900, "image_grid_thw": [[1, 40, 60]]},
    {"length": 900},
    {"length": 900, "image_grid_thw": [[1, 40, 60]]},
    {"length": 900, "image_grid_thw": None},
]
"""Megatron's sampler gives both images to the first of two ranks."""


def write_jsonl(folder: Path, samples: list[dict[str, Any]]) -> Path:
    file = folder / "samples.jsonl"
    file.write_text("".join(f"{json.dumps(sample)}\n" for sample in samples))
    return file


def run(command: str, file: Path | str, *flags: str, key: str = "image_grid_thw", model: str = MODEL) -> int:
    batch = ["--global-batch-size", "4", "--dp-size", "2", "--max-tokens-per-gpu", "4096"]
    return main([command, str(file), "--image-key", key, "--model", model, *batch, *flags])


def content_of(command: str, file: Path, *flags: str, key: str = "image_grid_thw") -> dict[str, Any]:
    out = file.parent / "out.json"
    assert run(command, file, *flags, "--json", str(out), key=key) == 0
    return json.loads(out.read_text())


def test_policies_are_judged_by_both_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = content_of("compare", write_jsonl(tmp_path, SAMPLES))
    text, image = COST(900), COST.image_cost(2400)
    launch = COST.per_microbatch
    found = {figures["name"]: figures["step_imbalance"] for figures in content["policies"]}
    heavy, light = 2 * (text + image + launch), 2 * (text + launch)
    assert found["stock"] == pytest.approx(2 * heavy / (heavy + light))
    assert found["by-flops"] == pytest.approx(1)
    assert not any("dynamic" in name for name in found)
    assert "Images: 2, mean 2400 patches." in capsys.readouterr().out


def test_a_plan_says_which_images_it_counted(tmp_path: Path) -> None:
    (step,) = content_of("plan", write_jsonl(tmp_path, SAMPLES))["steps"]
    assert step["image_patches"] == [[2400], [], [2400], []]
    assert [sorted(sample % 2 for slot in rank for sample in slot) for rank in step["ranks"]] == [[0, 1], [0, 1]]
    assert step["metrics"]["step_imbalance"] == pytest.approx(1)


def test_images_stay_with_their_samples(tmp_path: Path) -> None:
    samples = [{"length": 100 + row, "patches": [row] * (row % 3)} for row in range(16)]
    content = content_of("plan", write_jsonl(tmp_path, samples), "--shuffle", "--seed", "5", key="patches")
    lengths = [length for step in content["steps"] for length in step["lengths"]]
    images = [patches for step in content["steps"] for patches in step["image_patches"]]
    assert lengths != sorted(lengths)
    assert images == [samples[length - 100]["patches"] for length in lengths]


def test_look_ahead_counts_images_and_keeps_them_with_their_samples() -> None:
    lengths = np.array([10, 11, 12, 13, 14, 15, 16, 17])
    images = [[1000] if length in (10, 11, 12, 13) else [] for length in lengths.tolist()]
    batches = [GlobalBatch(lengths[:4], image_patches=images[:4]), GlobalBatch(lengths[4:], image_patches=images[4:])]
    model = CostModel(linear=1, image_linear=1)
    chosen = look_ahead(batches, window=2, cost_model=model, topology=Topology(2))
    pairs = [
        (int(length), list(patches))
        for batch in chosen
        for length, patches in zip(batch.segment_lengths, batch.image_patches or [], strict=True)
    ]
    assert sorted(pairs) == sorted(zip(lengths.tolist(), images, strict=True))
    assert [sum(map(len, batch.image_patches or [])) for batch in chosen] == [2, 2]


def test_forms_of_a_field(tmp_path: Path) -> None:
    values = [[3, 4], 5, [[2, 2, 3]], [], None]
    file = write_jsonl(tmp_path, [{"length": 1, "images": value} for value in values])
    assert read_image_patches(file, key="images") == [[3, 4], [5], [6, 6], [], []]


def test_a_parquet_column(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "samples.parquet"
    columns = {"length": [7, 8, 9], "image_grid_thw": [[[1, 2, 3], [1, 4, 4]], None, []]}
    parquet.write_table(pyarrow.table(columns), file)
    assert read_image_patches(file, key="image_grid_thw") == [[6, 16], [], []]
    with pytest.raises(BalanceError, match=r"no column 'images' \(--image-key\); it has length, image_grid_thw"):
        read_image_patches(file, key="images")


@pytest.mark.parametrize("value", [[1.5], "7", [True], [[1, 2]], [[1, 2, 3], 4], [-1], {"patches": 3}, [2**31]])
def test_a_value_that_is_no_images_is_named(tmp_path: Path, value: object) -> None:
    file = write_jsonl(tmp_path, [{"length": 1, "images": [4]}, {"length": 1, "images": value}])
    with pytest.raises(BalanceError, match=r"line 2: .* is no list of images"):
        read_image_patches(file, key="images")


def write_npy(folder: Path) -> Path:
    np.save(folder / "lengths.npy", np.arange(1, 9))
    return folder / "lengths.npy"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("compare", "--model", "Qwen3-8B"), "images cost nothing: give --model a model whose vision encoder is known"),
        (("compare", "--cost", "tokens"), "by tokens of Qwen2.5-VL-7B images cost nothing"),
        (("plan", "--image-key", "image"), "has no field 'image' (--image-key); it has length, image_grid_thw"),
        (("plan", "--balance-context-parallel"), "an image runs whole on the rank of its sample"),
    ],
    ids=["no encoder", "tokens", "no field", "dynamic sizes"],
)
def test_what_cannot_be_counted_is_one_line_and_status_2(
    arguments: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *flags = arguments
    assert run(command, write_jsonl(tmp_path, SAMPLES), *flags) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_only_files_with_fields_have_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "synthetic:gsm8k_sft") == 2
    assert "LENGTHS is not a file of lengths" in capsys.readouterr().err
    assert run("compare", write_npy(tmp_path)) == 2
    assert "no fields for images (--image-key): give a .jsonl or .parquet file" in capsys.readouterr().err
