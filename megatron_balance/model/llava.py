"""Reads the vision encoder of megatron.core's LLaVAModel from its modules, and from arguments of Megatron's scripts.

Nothing of Megatron is imported here.
"""

from __future__ import annotations

from typing import Any

from megatron_balance.errors import BalanceError
from megatron_balance.model.vision import VisionEncoder

_CHANNELS = 3  # of CLIPViTModel and RADIOViTModel


def encoder_of_llava(model: Any) -> VisionEncoder:
    """The encoder and projector of a LLaVAModel.

    Args:
        model: with its encoder, and so not a later stage of a pipeline.

    Raises:
        BalanceError: the encoder is a Hugging Face module, or frames of a video are joined.
    """
    encoder = model.vision_model
    if getattr(encoder, "config", None) is None or not hasattr(encoder, "patch_dim"):
        raise BalanceError(
            f"LLaVAModel's encoder is {type(encoder).__name__}: the sizes of CLIPViTModel and RADIOViTModel are read "
            "from the model; give cost as a ModelShape with vision for any other."
        )
    config = encoder.config
    return VisionEncoder(
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        ffn_hidden_size=config.ffn_hidden_size,
        gated_linear_unit=config.gated_linear_unit,
        patch_values=_CHANNELS * encoder.patch_dim**2,
        patches_per_token=4 if model._pixel_shuffle else 1,
        projector_hidden_size=model.vision_projection.config.ffn_hidden_size,
    )
