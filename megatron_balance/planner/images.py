"""The images of a global batch: what the vision encoder runs for each sample, beside its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError
from megatron_balance.planner.inputs import as_integers


@dataclass(frozen=True, eq=False)
class Images:
    """Patches of every image, sample after sample.

    Attributes:
        patches: `[sum(counts)]` int64 patches of each image.
        counts: `[num_samples]` int64 images of each sample; a sample may have none.
    """

    patches: NDArray[np.int64]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, image_patches: Sequence[Sequence[int]], *, num_samples: int) -> Images:
        """The images of samples.

        Args:
            image_patches: `[num_samples]`, for each sample the patches of each of its images.
            num_samples: samples of the global batch.

        Raises:
            BalanceError: there is not one entry for each sample, or a number of patches is negative or no integer.
        """
        if len(image_patches) != num_samples:
            raise BalanceError(
                f"image_patches has {len(image_patches)} entries: it must have one for each of {num_samples} samples, "
                "empty where a sample has no image."
            )
        flat = [num_patches for of_sample in image_patches for num_patches in of_sample]
        counts = np.fromiter(map(len, image_patches), dtype=np.int64, count=num_samples)
        return cls(as_integers(flat, name="image_patches"), counts)
