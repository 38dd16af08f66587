"""Our FLOPs of an image against torch's own count of what the public vision encoders of transformers compute.

Attention runs as matrix products (`eager`), every one of which torch's FlopCounterMode sees.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_balance.model.hf_vision import ENCODERS
from megatron_balance.model.vision import image_flops

pytest.importorskip("transformers")

TEXT_WIDTH = 56


def qwen2_5_vl(grid: tuple[int, int]) -> tuple[dict[str, Any], int]:
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as modeling
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig

    vision = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_heads": 4,
        "in_channels": 3,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [1],
        "out_hidden_size": TEXT_WIDTH,
    }
    config = Qwen2_5_VLVisionConfig(**vision)
    config._attn_implementation = "eager"
    model = modeling.Qwen2_5_VisionTransformerPretrainedModel._from_config(config)
    height, width = grid
    patches = torch.randn(height * width, 3 * 2 * 14 * 14)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(patches, grid_thw=torch.tensor([[1, height, width]]))
    return vision, counter.get_total_flops()


def llava_onevision(grid: tuple[int, int]) -> tuple[dict[str, Any], int]:
    from transformers import LlavaOnevisionConfig, Qwen2Config, SiglipVisionConfig, SiglipVisionModel
    from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionMultiModalProjector

    height, width = grid
    assert height == width, "SigLIP's images are square"
    vision = {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "patch_size": 14,
        "image_size": 14 * height,
        "vision_use_head": False,
    }
    config = SiglipVisionConfig(**vision)
    config._attn_implementation = "eager"
    model = SiglipVisionModel._from_config(config)
    whole = LlavaOnevisionConfig(vision_config=config, text_config=Qwen2Config(hidden_size=TEXT_WIDTH))
    projector = LlavaOnevisionMultiModalProjector(whole)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        projector(model(torch.randn(1, 3, 14 * height, 14 * width)).last_hidden_state)
    return vision, counter.get_total_flops()


@pytest.mark.parametrize("grid", [(16, 16), (24, 24)])
@pytest.mark.parametrize(("family", "count"), [("qwen2_5_vl", qwen2_5_vl), ("llava_onevision", llava_onevision)])
def test_torch_counts_the_same_for_an_image(family: str, count: Any, grid: tuple[int, int]) -> None:
    vision, counted = count(grid)
    encoder = ENCODERS[family](vision, TEXT_WIDTH)
    assert image_flops(encoder, hidden_size=TEXT_WIDTH)(grid[0] * grid[1]) == counted


def test_windows_that_an_image_does_not_fill_cost_at_most_what_is_said() -> None:
    vision, counted = qwen2_5_vl((10, 14))
    ours = image_flops(ENCODERS["qwen2_5_vl"](vision, TEXT_WIDTH), hidden_size=TEXT_WIDTH)
    assert ours(140) - ours.windowed * 140 < counted < ours(140)
