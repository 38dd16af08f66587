"""Counts the patches that a vision encoder runs for each sample, from the sample's ragged keys.

`image_grid_thw` and `video_grid_thw`, as processors of the Qwen-VL family make them, describe each image. Without such
a key, each entry `[channels, height, width]` of the pixels is an image: a tile of one size, as in LLaVA.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError
from megatron_balance.model.vision import patches_of_grids
from megatron_balance.samples.sample import Sample, SampleSchema

GRID_KEYS = ("image_grid_thw", "video_grid_thw")
PIXEL_KEYS = ("pixel_values", "images", "imgs")


def image_patches(samples: Sequence[Sample], *, patch_values: int) -> NDArray[np.int64]:
    """Patches of the samples' images.

    Args:
        samples: of one schema, on the CPU.
        patch_values: numbers of a patch: channels times height times width; 0 where it is not known.

    Returns:
        `[num_samples, 2]` int64, the sum over a sample's images of their patches, and of their squared patches.

    Raises:
        BalanceError: grids of another kind than `patches_of_grids` takes, or pixels whose patches cannot be counted.
    """
    sums = np.zeros((len(samples), 2), dtype=np.int64)
    shapes = {key.name: key.shape for key in SampleSchema.of(samples[0]).keys if key.ragged} if samples else {}
    grids = [name for name in GRID_KEYS if name in shapes]
    for name in grids:
        for index, sample in enumerate(samples):
            patches = patches_of_grids(sample.ragged[name].numpy())
            sums[index] += patches.sum(), (patches**2).sum()
    for name in PIXEL_KEYS:
        if name in shapes and not grids:
            of_tile = _patches_of_tile(name, shapes[name], patch_values=patch_values)
            num_tiles = np.array([len(sample.ragged[name]) for sample in samples], dtype=np.int64)
            sums += num_tiles[:, None] * np.array([of_tile, of_tile**2])
    return sums


def _patches_of_tile(name: str, shape: Sequence[int], *, patch_values: int) -> int:
    num_values = int(np.prod(shape))
    if len(shape) != 3:
        raise BalanceError(
            f"{name} has entries of shape {list(shape)}, and there is no {' or '.join(GRID_KEYS)}: patches are counted "
            "from such a key, or from tiles [channels, height, width]. Give one of them, or plan by tokens: drop "
            "--balance-by-flops."
        )
    if not patch_values:
        raise BalanceError(
            f"{name} has tiles of shape {list(shape)}, and the size of a patch is not known: give cost as a ModelShape "
            "with a vision encoder in place of a CostModel."
        )
    if num_values % patch_values:
        raise BalanceError(
            f"{name} has tiles of shape {list(shape)}: their {num_values} numbers must be a multiple of the "
            f"encoder's {patch_values} of a patch (VisionEncoder.patch_values)."
        )
    return num_values // patch_values
