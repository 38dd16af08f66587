"""Images of samples: their cost is added to the tokens', and plans even out the sum."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron_balance import (
    BalanceError,
    CostModel,
    DataSchedule,
    Limits,
    ModelShape,
    Topology,
    build_data_schedule,
    calculate_fwd_flops,
)
from megatron_balance.cost import MAX_TOTAL_COST
from megatron_balance.model import PRESETS, VisionEncoder, fwd_flops, image_flops, patches_of_grids
from megatron_balance.planner import schedule_metrics

MODEL = CostModel(linear=10, quadratic=1, image_linear=7, image_quadratic=2)
QWEN = ModelShape.preset("Qwen2.5-VL-7B")


def plan(lengths: list[int], image_patches: list[list[int]], **options: Any) -> DataSchedule:
    options = {"cost_model": MODEL, "topology": Topology(2), "limits": Limits(100), **options}
    return build_data_schedule(lengths, image_patches=image_patches, **options).check()


def test_costs_are_sums_over_tokens_and_images() -> None:
    # test_schedule_properties.py and the cells of test_golden.py judge drawn ones.
    schedule = plan([5, 70], [[3, 20], []], objective="step")
    costs = [10 * 5 + 5**2 + 7 * 23 + 2 * (3**2 + 20**2), 10 * 70 + 70**2]
    assert sorted(schedule.cost_grid.reshape(-1).tolist()) == sorted(costs)
    assert schedule_metrics(schedule).predicted_cost == schedule.predicted_cost == max(costs)


def test_images_are_scaled_with_tokens() -> None:
    model = CostModel(linear=2**40, image_linear=2**50)
    scaled = model.sample_costs(np.array([1, 1024]), image_patches=np.array([[2**14, 0], [1, 0]]))
    assert scaled.shift > 0
    assert int(scaled.costs.sum()) + int(scaled.image_costs.sum()) < MAX_TOTAL_COST
    assert scaled.image_costs.tolist() == [2**64 >> scaled.shift, 2**50 >> scaled.shift]
    assert scaled.costs.tolist() == [2**40 >> scaled.shift, 2**50 >> scaled.shift]


def test_wrong_images_are_refused_by_name() -> None:
    with pytest.raises(BalanceError, match=r"image_patches has 1 entries.*each of 2 samples"):
        plan([3, 4], [[5]])
    with pytest.raises(BalanceError, match=r"image_patches\[1\] is -1"):
        plan([3, 4], [[5], [-1]])
    with pytest.raises(BalanceError, match=r"image_patches does not go with Topology\.dynamic_cp"):
        plan([3, 4], [[5], []], topology=Topology(2, dynamic_cp=True))


def test_flops_of_images_are_added() -> None:
    assert QWEN.vision is not None
    of_image = image_flops(QWEN.vision, hidden_size=QWEN.hidden_size)
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
    return int(scaled.image_costs[0])


def test_training_takes_gemms_three_times_and_attention_three_and_a_half() -> None:
    assert QWEN.vision is not None
    flops = image_flops(QWEN.vision, hidden_size=QWEN.hidden_size)
    model, again = CostModel.from_shape(QWEN), CostModel.from_shape(QWEN, recompute=True)
    gemms, cores = 1000 * (flops.linear + flops.projector), flops.windowed * 1000 + flops.quadratic * 10**6
    assert image_cost(model) == 3 * gemms + 7 * cores // 2
    assert image_cost(again) == image_cost(model) + flops(1000)
    assert image_cost(CostModel.from_shape(ModelShape.preset("Qwen2.5-7B"))) == 0


def test_frozen_parts_cost_less() -> None:
    assert QWEN.vision is not None
    flops = image_flops(QWEN.vision, hidden_size=QWEN.hidden_size)
    encoder = CostModel.from_shape(QWEN, frozen_encoder=True, recompute=True)
    # Forward alone, and once more the projector for the gradients of its weights.
    assert image_cost(encoder) == flops(1000) + 1000 * flops.projector


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
        "projector_hidden_size": 8,
    }
    with pytest.raises(BalanceError, match=r"VisionEncoder\.num_layers is 0"):
        VisionEncoder(**{**sizes, "num_layers": 0})
    with pytest.raises(BalanceError, match=r"num_windowed_layers is 1.*window_patches must be set"):
        VisionEncoder(**sizes, num_windowed_layers=1)


def test_frames_of_a_grid_are_images() -> None:
    assert patches_of_grids(np.array([[1, 4, 6], [3, 2, 2], [0, 8, 8]])).tolist() == [24, 4, 4, 4]
    assert patches_of_grids([]).tolist() == patches_of_grids(np.zeros((0, 3))).tolist() == []
    wrong_grids: list[Any] = [[[1, 2]], [1, 2, 3], [[1, 2, -3]], [[1, 2, 3.5]], [[[1, 2, 3]]]]
    for wrong in wrong_grids:
        with pytest.raises(BalanceError, match=r"grids are .*image_grid_thw"):
            patches_of_grids(wrong)
