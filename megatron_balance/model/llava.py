"""Reads the vision encoder of megatron.core's LLaVAModel from its modules, or from the flags of Megatron's example.

Nothing of Megatron is imported here.
"""

from __future__ import annotations

from typing import Any

from megatron_balance.errors import BalanceError
from megatron_balance.model.vision import VisionEncoder

_CHANNELS = 3  # of CLIPViTModel and RADIOViTModel

ENCODERS: dict[str, dict[str, int | bool]] = {
    "clip": {"hidden_size": 1024, "num_layers": 24, "ffn_hidden_size": 4096},
    "siglip": {"hidden_size": 1152, "num_layers": 27, "ffn_hidden_size": 4304},
    "internvit": {"hidden_size": 3200, "num_layers": 45, "ffn_hidden_size": 12800},
    "internvit300M": {"hidden_size": 1024, "num_layers": 24, "ffn_hidden_size": 4096},
    "radio": {"hidden_size": 1280, "num_layers": 32, "ffn_hidden_size": 5120},
    "radio-g": {"hidden_size": 1536, "num_layers": 40, "ffn_hidden_size": 4096, "gated_linear_unit": True},
    "cradio-g": {"hidden_size": 1536, "num_layers": 40, "ffn_hidden_size": 6144},
}
"""Sizes by `--vision-model-type`, as `get_vision_model_config` of Megatron's examples/multimodal/config.py has them."""

PROJECTORS = {
    "llama3_8b": 14336,
    "llama3.1_8b": 4096,
    "llama3.2_1b": 2048,
    "mistral_7b": 14336,
    "yi-34b": 20480,
    "qwen2.0_72B": 29568,
    "qwen2.5_7B": 3584,
    "qwen2.5_72B": 29568,
    "nemotron5-8b": 21504,
    "nemotron5-hybrid-8b": 21504,
    "nemotron5-hybrid-56b": 32768,
}
"""Width of the projector by `--language-model-type`, as `get_vision_projection_config` there has it."""


def encoder_of_llava(model: Any) -> VisionEncoder:
    """The encoder and projector of a LLaVAModel.

    Args:
        model: with its encoder, and so not a later stage of a pipeline.

    Raises:
        BalanceError: the encoder is another module, such as one of Hugging Face.
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


def encoder_from_megatron_args(args: object) -> VisionEncoder | None:
    """The encoder that the flags of Megatron's examples/multimodal describe; None where there is none of them.

    Args:
        args: parsed arguments.

    Raises:
        BalanceError: a model type that the example has no sizes for.
    """
    vision: Any = getattr(args, "vision_model_type", None)
    language: Any = getattr(args, "language_model_type", None)
    if vision is None:
        return None
    for name, value, known in (("vision", vision, ENCODERS), ("language", language, PROJECTORS)):
        if value not in known:
            raise BalanceError(
                f"--{name}-model-type is {value!r}: the sizes of {', '.join(known)} are known; balance by tokens, or "
                "describe the encoder with --balance-encoder."
            )
    return VisionEncoder(
        **({"gated_linear_unit": False} | ENCODERS[vision]),  # type: ignore[arg-type]
        patch_values=_CHANNELS * getattr(args, "patch_dim", 0) ** 2,
        patches_per_token=4 if getattr(args, "pixel_shuffle", False) else 1,
        projector_hidden_size=PROJECTORS[language],
    )
