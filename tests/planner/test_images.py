"""Images of samples: their cost is added to the tokens'; test_schedule_properties.py plans with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron_balance import (
    BalanceError,
    CostModel,
    Limits,
    ModelShape,
    Topology,
    build_data_schedule,
    calculate_fwd_flops,
)
from megatron_balance.cost.model import MAX_TOTAL_COST
from megatron_balance.model.flops import fwd_flops, image_flops
from megatron_balance.model.hf_config import PRESETS
from megatron_balance.model.vision import VisionEncoder

QWEN = ModelShape.preset("Qwen2.5-VL-7B")


def test_images_are_scaled_with_tokens() -> None:
    model = CostModel(linear=2**40, image_linear=2**50)
    scaled = model.sample_costs(np.array([1, 1024]), image_patches=np.array([[2**14, 0], [1, 0]]))
    assert scaled.shift > 0
    assert int(scaled.costs.sum()) + int(scaled.image_costs.sum()) < MAX_TOTAL_COST
    assert scaled.image_costs.tolist() == [[2**64 >> scaled.shift, 2**50 >> scaled.shift]]
    assert scaled.costs.tolist() == [[2**40 >> scaled.shift, 2**50 >> scaled.shift]]


def test_wrong_images_are_refused_by_name() -> None:
    options: dict[str, Any] = {"cost_model": CostModel.tokens(), "limits": Limits(100)}
    for patches, topology, message in (
        ([[5]], Topology(2), r"image_patches has 1 entries.*each of 2 samples"),
        ([[5], [-1]], Topology(2), r"image_patches\[1\] is -1"),
        ([[5], []], Topology(2, dynamic_cp=True), r"image_patches does not go with Topology\.dynamic_cp"),
    ):
        with pytest.raises(BalanceError, match=message):
            build_data_schedule([3, 4], image_patches=patches, topology=topology, **options)


def test_flops_of_images_are_added() -> None:
    of_image = image_flops(QWEN)
    flops = fwd_flops(QWEN)
    assert calculate_fwd_flops([10, 30], QWEN, image_patches=[64, 256]) == (
        flops(10) + flops(30) + of_image(64) + of_image(256)
    )
    with pytest.raises(BalanceError, match=r"ModelShape\.vision is None"):
        calculate_fwd_flops([10], ModelShape.preset("Qwen3-8B"), image_patches=[64])


def image_cost(model: CostModel) -> int:
    """Of an image of 1,000 patches."""
    scaled = model.sample_costs(np.array([1]), image_patches=np.array([[1000, 1000**2]]))
    assert scaled.shift == 0
    return int(scaled.image_costs[0, 0])


@pytest.mark.parametrize(("frozen", "gemms", "half_cores"), [(False, 3, 7), (True, 1, 2)])
def test_training_takes_gemms_three_times_and_attention_three_and_a_half(
    frozen: bool, gemms: int, half_cores: int
) -> None:
    flops = image_flops(QWEN)
    cost = image_cost(CostModel.from_shape(QWEN, frozen_encoder=frozen))
    assert cost == gemms * flops.linear * 1000 + half_cores * flops.quadratic * 10**6 // 2
    assert image_cost(CostModel.from_shape(ModelShape.preset("Qwen2.5-7B"))) == 0


def test_a_nested_config_has_the_same_encoder() -> None:
    flat = PRESETS["Qwen2.5-VL-7B"]
    text = {key: value for key, value in flat.items() if key != "vision_config"} | {"model_type": "qwen2_5_vl_text"}
    nested = {"model_type": "qwen2_5_vl", "text_config": text, "vision_config": flat["vision_config"]}
    assert ModelShape.from_hf_config(nested) == ModelShape.from_hf_config(flat)
    with pytest.raises(BalanceError, match=r"spatial_merge_size is missing.*'qwen2_5_vl'"):
        ModelShape.from_hf_config(flat | {"vision_config": {"depth": 32}})
    for name in ("depth", "patch_size", "temporal_patch_size"):  # a truth value counts as 1 in Python
        with pytest.raises(BalanceError, match=f"{name} is True in the Hugging Face config"):
            ModelShape.from_hf_config(flat | {"vision_config": flat["vision_config"] | {name: True}})


def test_sizes_of_an_encoder_are_checked() -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "num_layers": 2,
        "ffn_hidden_size": 8,
        "gated_linear_unit": False,
        "patch_values": 12,
        "patches_per_token": 1,
    }
    with pytest.raises(BalanceError, match=r"VisionEncoder\.num_layers is 0"):
        VisionEncoder(**{**sizes, "num_layers": 0})
    with pytest.raises(BalanceError, match=r"num_windowed_layers is 1.*window_patches must be set"):
        VisionEncoder(**sizes, num_windowed_layers=1)
