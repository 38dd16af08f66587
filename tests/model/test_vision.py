"""FLOPs of an image against torch's own count of what the encoders of transformers compute.

Attention runs as matrix products (`eager`), every one of which torch's FlopCounterMode sees.
"""

import pytest

from megatron_balance import ModelShape
from megatron_balance.model.flops import image_flops
from megatron_balance.model.hf_config import PRESETS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 4,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 56,
}


def flops_of(family, sizes, grid):
    """Torch's count for an image, and ours for any."""
    from torch.utils.flop_counter import FlopCounterMode

    if family == "qwen2_5_vl":
        from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as modeling

        kind, config = modeling.Qwen2_5_VisionTransformerPretrainedModel, modeling.Qwen2_5_VLVisionConfig(**sizes)
    else:
        from transformers.models.qwen3_vl import modeling_qwen3_vl as modeling

        kind, config = modeling.Qwen3VLVisionModel, modeling.Qwen3VLVisionConfig(**sizes)
    config._attn_implementation = "eager"
    model = kind._from_config(config)
    height, width = grid
    patches = torch.randn(height * width, 3 * 2 * 14 * 14)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(patches, grid_thw=torch.tensor([[1, height, width]]))
    text = PRESETS["Qwen3-8B"] | {"hidden_size": 56, "head_dim": 8}
    shape = ModelShape.from_hf_config({"model_type": family, "text_config": text, "vision_config": sizes})
    return counter.get_total_flops(), image_flops(shape)


WINDOWED = SIZES | {"window_size": 112, "fullatt_block_indexes": [1]}


@pytest.mark.parametrize("grid", [(16, 16), (24, 24)])
@pytest.mark.parametrize(
    ("family", "sizes"), [("qwen2_5_vl", WINDOWED), ("qwen3_vl", SIZES | {"deepstack_visual_indexes": [0, 2]})]
)
def test_torch_counts_the_same_for_an_image(family, sizes, grid):
    counted, ours = flops_of(family, sizes, grid)
    assert ours(grid[0] * grid[1]) == counted


def test_windows_that_an_image_does_not_fill_cost_at_most_what_is_said():
    counted, ours = flops_of("qwen2_5_vl", WINDOWED, (10, 14))
    full_windows = 4 * 32 * 64 * 2  # width, patches of a window, layers
    assert ours(140) - full_windows * 140 < counted < ours(140)
