"""The images of a global batch: what the vision encoder runs for each sample, beside its tokens.

The cost of an image is a polynomial of degree two in its patches, so two sums describe all images of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError
from megatron_balance.planner.inputs import as_integers, sum_segments


@dataclass(frozen=True, eq=False)
class Images:
    """The images of every sample.

    Attributes:
        sums: `[num_samples, 2]` int64, the sum over a sample's images of their patches, and of their squared patches; 0
            for a sample without an image.
    """

    sums: NDArray[np.int64]

    @classmethod
    def of(cls, image_patches: Sequence[Sequence[int]] | Images, *, num_samples: int) -> Images:
        """The images of samples.

        Args:
            image_patches: `[num_samples]`, for each sample the patches of each of its images; or their sums.
            num_samples: samples of the global batch.

        Raises:
            BalanceError: there is not one entry for each sample, or a number of patches is negative or no integer.
        """
        num_given = len(image_patches.sums if isinstance(image_patches, Images) else image_patches)
        if num_given != num_samples:
            raise BalanceError(
                f"image_patches has {num_given} entries: it must have one for each of {num_samples} samples, "
                "empty where a sample has no image."
            )
        if isinstance(image_patches, Images):
            return image_patches
        flat = [num_patches for of_sample in image_patches for num_patches in of_sample]
        patches = as_integers(flat, name="image_patches", bits=30)  # so that squares fit in int64
        counts = np.fromiter(map(len, image_patches), dtype=np.int64, count=num_samples)
        return cls(np.stack([sum_segments(power, num_segments=counts) for power in (patches, patches**2)], axis=1))
