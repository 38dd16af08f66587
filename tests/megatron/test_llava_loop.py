"""megatron.core's LLaVAModel trains balanced as it trains stock, and both parts of its cost are even."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from forked_runs import train
from rounding import ALLOWANCES, assert_equal
from training_run import Recorded, RunFailed, largest_difference

from megatron_balance.cost.model import MICROBATCH_TOKENS, CostModel
from megatron_balance.model.shape import ModelShape
from megatron_balance.model.vision import VisionEncoder

NUM_STEPS = 4
SHAPE = ModelShape(
    hidden_size=32,
    num_layers=2,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=8,
    ffn_hidden_size=128,
    padded_vocab_size=102,
    gated_linear_unit=False,
    vision=VisionEncoder(
        hidden_size=16,
        num_layers=2,
        ffn_hidden_size=64,
        gated_linear_unit=False,
        patch_values=3 * 4 * 4,
        patches_per_token=1,
        projector_hidden_size=32,
    ),
)
"""Of the model in scripts/train_llava_loop.py."""
COST = CostModel.from_shape(SHAPE, microbatch_tokens=MICROBATCH_TOKENS)


def run(folder: Path, *, num_ranks: int = 2, **settings: Any) -> Recorded:
    loop = json.dumps({"num_steps": NUM_STEPS, **settings})
    folder.mkdir()
    return train(folder, [], num_ranks=num_ranks, module="train_llava_loop", environment={"LOOP": loop})


def num_tiles(run: Recorded) -> list[list[int]]:
    """Tiles that each rank's encoder runs in each step."""
    return [[sum(step["num_tiles"]) for step in steps] for steps in run.ranks]


@pytest.mark.parametrize(
    ("images", "num_ranks"), [pytest.param("some", 2, id="DP2"), pytest.param("some", 4, id="DP4")]
)
def test_llava_trains_as_stock(tmp_path: Path, images: str, num_ranks: int) -> None:
    stock = run(tmp_path / "stock", num_ranks=num_ranks, images=images, balanced=False)
    ours = run(tmp_path / "ours", num_ranks=num_ranks, images=images)
    assert_equal(ours, reference=stock)
    assert largest_difference(ours, reference=stock, key="encoder_grad_norm") < ALLOWANCES["fp32"].grad_norm
    for step, of_ranks in zip(ours.steps, zip(*num_tiles(ours), strict=True), strict=True):
        assert max(step["costs"]) < 1.2 * sum(step["costs"]) / num_ranks
        slots = num_ranks * len(step["num_tiles"])
        of_images = sum(of_ranks) * COST.image_cost(9)
        assert of_images > 0
        assert sum(step["costs"]) == of_images + sum(map(COST, step["lengths"])) + slots * COST.per_microbatch


def test_ranks_without_an_image(tmp_path: Path) -> None:
    stock = run(tmp_path / "stock", images="few", balanced=False)
    ours = run(tmp_path / "ours", images="few")
    assert_equal(ours, reference=stock)
    assert largest_difference(ours, reference=stock, key="encoder_grad_norm") < ALLOWANCES["fp32"].grad_norm
    for of_ranks in zip(*num_tiles(ours), strict=True):
        assert min(of_ranks) == 0 < max(of_ranks)


def test_steps_without_an_image(tmp_path: Path) -> None:
    stock = run(tmp_path / "stock", images="none", balanced=False)
    ours = run(tmp_path / "ours", images="none")
    assert_equal(ours, reference=stock)
    assert all(step["encoder_grad_norm"] == 0 for step in ours.steps + stock.steps)


def test_overlapped_gradients_need_an_image_in_every_microbatch(tmp_path: Path) -> None:
    """Megatron starts to reduce a bucket when all its weights have a gradient; zeros through the encoder bring one."""
    stock = run(tmp_path / "stock", images="few", balanced=False)
    ours = run(tmp_path / "ours", images="few", overlap_grad_reduce=True, dummy_images=True)
    assert_equal(ours, reference=stock)
    with pytest.raises(RunFailed, match="per_param_grad_ready_counts"):
        run(tmp_path / "without", images="few", overlap_grad_reduce=True, balanced=False)
