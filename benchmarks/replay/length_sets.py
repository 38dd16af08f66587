"""Length sets by name: the real ones, and made-up ones that show what a gain needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.planner.setups import global_batches
from benchmarks.replay.setups import ReplaySetup
from megatron_balance.lengths.synthetic import SYNTHETIC_LENGTHS, LengthMixture

_LOGNORMALS = ((256, 0.5), (256, 1.0), (256, 1.5), (256, 2.0), (1024, 1.0), (1024, 2.0), (4096, 1.0), (4096, 2.0))
"""Medians, tokens, and standard deviations of the logarithm."""

_RARE_LONG = ((0.02, 8192, 128), (0.05, 8192, 128), (0.02, 8192, 512), (0.02, 16384, 256))
"""Part of the samples that is long, their tokens, and those of the rest."""


def _mixture(*, medians: tuple[int, ...], sigma: float, weights: tuple[float, ...]) -> LengthMixture:
    return LengthMixture(
        "made up",
        weights=weights,
        mu=tuple(math.log(median) for median in medians),
        sigma=(sigma,) * len(medians),
        shortest=16,
        longest=2**20,
        fit_distance=0.0,
    )


MADE_UP: dict[str, LengthMixture] = {
    f"lognormal, median {median}, sigma {sigma}": _mixture(medians=(median,), sigma=sigma, weights=(1.0,))
    for median, sigma in _LOGNORMALS
} | {
    f"{part:.0%} of {long} among {short}": _mixture(medians=(short, long), sigma=0.25, weights=(1 - part, part))
    for part, long, short in _RARE_LONG
}
"""The last are the rare long answers of a reasoning model: two humps, each a quarter wide in the logarithm."""

RARE_LONG = "2% of 8192 among 128"
"""The set that is replayed beside each setup's own."""

LENGTH_SETS = (*SYNTHETIC_LENGTHS, *MADE_UP)


def draw_batches(
    name: str, *, setup: ReplaySetup, num_batches: int, lengths_folder: Path | None
) -> Sequence[NDArray[np.int64]]:
    """The first global batches of a length set for a setup; longer samples than a micro-batch holds are left out.

    Returns:
        `[num_batches]` of `[global_batch_size]` int64, tokens.

    Raises:
        ValueError: no sample of the set fits a micro-batch.
    """
    if name in MADE_UP:
        # Samples longer than the cap are redrawn.
        mixture = replace(MADE_UP[name], longest=setup.cap)
        drawn = mixture.draw(num_batches * setup.global_batch_size, seed=0)
        return list(drawn.reshape(num_batches, setup.global_batch_size))
    one_set = replace(setup, length_names=(name,), num_batches=num_batches)
    batches = list(global_batches(one_set, lengths_folder=lengths_folder))
    if not any(batch.any() for batch in batches):
        raise ValueError(f"{name} has no sample of at most {setup.cap} tokens, the cap of {setup.name}: choose another")
    return batches
