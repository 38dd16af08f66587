"""Counts the patches of a sample's images, from the inputs that a Hugging Face processor made of them.

Systems for post-training carry them beside a sample's tokens as one dict a sample, under the processor's own names:
`pixel_values` with `image_grid_thw`, `pixel_values_videos` with `video_grid_thw`. No encoder of audio is known: audio
counts as its tokens alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_balance.cost.model import CostModel
from megatron_balance.cost.resolve import Model, find_shape
from megatron_balance.errors import BalanceError
from megatron_balance.model.vision import VisionEncoder, patches_of_grids
from megatron_balance.planner import Images

_VISUAL_KEYS = (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw"))


def counted_encoder(model: Model | None, *, cost_model: CostModel) -> VisionEncoder | None:
    """The encoder of a model, if images cost anything; None where there is nothing to count.

    Args:
        model: as `resolve_cost` takes it.
        cost_model: cost of a sample, by that model or by something else.
    """
    if model is None or not (cost_model.image_linear or cost_model.image_quadratic):
        return None
    return find_shape(model).vision


def images_of_samples(inputs: Sequence[Mapping[str, Any] | None], *, encoder: VisionEncoder) -> Images:
    """The images of samples, and the frames of their videos.

    A grid `[num_images, 3]` gives their patches (Qwen-VL). Without one, pixels `[..., channels, height, width]` are cut
    into patches of the encoder's size, picture by picture (tiles of LLaVA; tiles of padding count, which the model
    leaves out), and pixels `[num_patches, patch_values]` count as one image. A grid on the meta device has no
    values: there pixels count.

    Args:
        inputs: `[num_samples]` the processor's outputs, tensors or arrays; None or {} for a sample of text alone.
        encoder: the model's.

    Raises:
        BalanceError: a grid has another shape, or pixels are too small for a patch.
    """
    return Images.of([_patches(of_sample or {}, encoder=encoder) for of_sample in inputs], num_samples=len(inputs))


def image_costs(images: Images, *, cost_model: CostModel) -> list[int]:
    """Exact cost of each sample's images, `[num_samples]` Python integers."""
    return [
        cost_model.image_linear * sizes + cost_model.image_quadratic * squares
        for sizes, squares in images.sums.tolist()
    ]


def _patches(inputs: Mapping[str, Any], *, encoder: VisionEncoder) -> list[int]:
    patches: list[int] = []
    for pixels_key, grid_key in _VISUAL_KEYS:
        grid, pixels = inputs.get(grid_key), inputs.get(pixels_key)
        if grid is not None and not getattr(grid, "is_meta", False):
            patches += patches_of_grids(grid.tolist()).tolist()
        elif pixels is not None:
            patches += _patches_of_pixels(pixels.shape, encoder=encoder, key=pixels_key)
    return patches


def _patches_of_pixels(shape: Sequence[int], *, encoder: VisionEncoder, key: str) -> list[int]:
    if len(shape) == 2:
        return [int(shape[0])]
    if len(shape) < 3 or not 0 < shape[-3] <= encoder.patch_values:
        raise BalanceError(
            f"{key} has shape {list(shape)}: it must be [..., channels, height, width], or [num_patches, patch_values]."
        )
    *pictures, channels, height, width = shape
    side = math.isqrt(encoder.patch_values // channels)
    return [(height // side) * (width // side)] * math.prod(pictures)
