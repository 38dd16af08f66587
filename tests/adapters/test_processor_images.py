"""Patches of images from the outputs of Hugging Face processors, as adapters find them beside a sample's tokens."""

from typing import Any

import numpy as np
import pytest
import torch

from megatron_balance import BalanceError, CostModel, ModelShape
from megatron_balance.adapters.processor_images import counted_encoder, images_of_samples
from megatron_balance.model.vision import VisionEncoder


def encoder_of(model: str) -> VisionEncoder:
    encoder = ModelShape.preset(model).vision
    assert encoder is not None
    return encoder


def patches_are(inputs: Any, patches: list[int], *, encoder: VisionEncoder) -> bool:
    """True if a sample's images have these patches, by their sum and the sum of their squares."""
    images = images_of_samples([None, inputs], encoder=encoder)
    return images.sums.tolist() == [[0, 0], [sum(patches), sum(size**2 for size in patches)]]


QWEN, LLAVA = encoder_of("Qwen2.5-VL-7B"), encoder_of("LLaVA-OneVision-Qwen2-7B")


@pytest.mark.parametrize(
    ("inputs", "patches"),
    [
        (None, []),
        ({}, []),
        ({"pixel_values": None, "image_grid_thw": None, "input_features": torch.zeros(3, 80)}, []),
        ({"pixel_values": torch.zeros(40, 1176), "image_grid_thw": torch.tensor([[1, 4, 6], [1, 4, 4]])}, [24, 16]),
        ({"video_grid_thw": np.array([[3, 2, 4]]), "image_grid_thw": torch.tensor([[1, 2, 2]])}, [4, 8, 8, 8]),
        # Without its grid, the pixels of all images count as one.
        ({"pixel_values": torch.zeros(40, 1176)}, [40]),
    ],
    ids=["none", "empty", "no picture", "images", "images and videos", "no grid"],
)
def test_grids_and_flat_pixels(inputs: Any, patches: list[int]) -> None:
    assert patches_are(inputs, patches, encoder=QWEN)


def test_tiles_are_cut_into_patches_of_the_encoder() -> None:
    assert patches_are({"pixel_values": np.zeros((2, 3, 3, 384, 384))}, [27 * 27] * 6, encoder=LLAVA)
    assert patches_are({"pixel_values_videos": np.zeros((1, 8, 3, 384, 384))}, [27 * 27] * 8, encoder=LLAVA)
    assert patches_are({"pixel_values": torch.zeros(3, 28, 42)}, [6], encoder=LLAVA)


@pytest.mark.parametrize("shape", [(7,), (0, 5, 5), (600, 5, 5)])
def test_pixels_of_another_shape_are_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(BalanceError, match=r"pixel_values has shape"):
        images_of_samples([{"pixel_values": torch.zeros(shape)}], encoder=LLAVA)


def test_only_an_encoder_that_costs_anything_is_counted() -> None:
    flops = CostModel.from_shape(ModelShape.preset("Qwen2.5-VL-7B"))
    assert counted_encoder("Qwen2.5-VL-7B", cost_model=flops) == QWEN
    assert counted_encoder("Qwen2.5-VL-7B", cost_model=CostModel.tokens()) is None
    assert counted_encoder(None, cost_model=flops) is None
