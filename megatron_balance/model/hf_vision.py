"""Reads the vision encoder of a Hugging Face `config.json`.

One reader per family; `ENCODERS` names them. Other families' vision and audio towers are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_balance.model.vision import VisionEncoder

Config = Mapping[str, Any]


def _qwen2_5_vl(vision: Config, text_hidden_size: int) -> VisionEncoder:
    """Windows in all layers but `fullatt_block_indexes`; `spatial_merge_size²` patches make a token."""
    merged = vision["spatial_merge_size"] ** 2
    side = vision["window_size"] // vision["patch_size"]
    channels = vision.get("in_channels") or vision["in_chans"]
    return VisionEncoder(
        hidden_size=vision["hidden_size"],
        num_layers=vision["depth"],
        ffn_hidden_size=vision["intermediate_size"],
        gated_linear_unit=True,
        patch_values=channels * vision["temporal_patch_size"] * vision["patch_size"] ** 2,
        patches_per_token=merged,
        projector_hidden_size=merged * vision["hidden_size"],
        window_patches=side**2,
        num_windowed_layers=vision["depth"] - len(vision["fullatt_block_indexes"]),
    )


def _llava_onevision(vision: Config, text_hidden_size: int) -> VisionEncoder:
    """SigLIP without its head; every patch is projected before tokens are dropped or pooled."""
    return VisionEncoder(
        hidden_size=vision["hidden_size"],
        num_layers=vision["num_hidden_layers"],
        ffn_hidden_size=vision["intermediate_size"],
        gated_linear_unit=False,
        patch_values=vision.get("num_channels", 3) * vision["patch_size"] ** 2,
        patches_per_token=1,
        projector_hidden_size=text_hidden_size,
    )


ENCODERS: dict[str, Callable[[Config, int], VisionEncoder]] = {
    "qwen2_5_vl": _qwen2_5_vl,
    "llava_onevision": _llava_onevision,
}
"""Reader of `vision_config` by the model_type of the whole model; it is given the text model's hidden_size as well."""
