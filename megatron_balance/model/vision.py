"""The shape of a vision encoder and its projector, and the patches of images. Its FLOPs are in flops.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError, check_sizes


@dataclass(frozen=True, kw_only=True)
class VisionEncoder:
    """Sizes of a vision transformer and of the projector to the language model's width.

    Attributes:
        hidden_size: width of the residual stream; heads make it up.
        num_layers: layers that run. One whose output is not used counts as none.
        ffn_hidden_size: width of the MLP.
        gated_linear_unit: the MLP has a gate: three GEMMs, not two.
        patch_values: numbers of a patch: channels times frames times height times width.
        patches_per_token: patches that the projector joins into one token, each of its two layers as wide as they are.
        num_projectors: projectors that an image goes through, those of DeepStack included.
        window_patches: patches of a window; 0 where all layers attend to the whole image.
        num_windowed_layers: layers that attend within a window only.

    Raises:
        BalanceError: a size is not a positive integer.
    """

    hidden_size: int
    num_layers: int
    ffn_hidden_size: int
    gated_linear_unit: bool
    patch_values: int
    patches_per_token: int
    num_projectors: int = 1
    window_patches: int = 0
    num_windowed_layers: int = 0

    def __post_init__(self) -> None:
        check_sizes(self)


def patches_of_grids(grids: Sequence[Sequence[int]] | NDArray[Any]) -> NDArray[np.int64]:
    """Patches of every frame, from the `image_grid_thw` or `video_grid_thw` of Hugging Face processors.

    `[num_images, 3]` frames, and rows and columns of patches of a frame. A frame attends to itself alone, so that a
    video costs as much as images of its frames (transformers, `vision_utils.get_vision_cu_seqlens`).

    Examples:
        >>> patches_of_grids([[1, 34, 46], [2, 8, 8]]).tolist()
        [1564, 64, 64]
    """
    sizes = np.asarray(grids)
    if sizes.size == 0:
        return np.zeros(0, dtype=np.int64)
    if sizes.ndim != 2 or sizes.shape[1] != 3 or sizes.dtype.kind not in "iu" or sizes.min() < 0:
        raise BalanceError(
            f"grids are {sizes.dtype} of shape {list(sizes.shape)}: they must be [num_images, 3] integers of at least "
            "0, frames, rows and columns of patches (image_grid_thw)."
        )
    frames, rows, columns = sizes.astype(np.int64).T
    return np.repeat(rows * columns, frames)
