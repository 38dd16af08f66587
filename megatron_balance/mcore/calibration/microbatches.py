"""The micro-batches that a calibration measures: one length each to fit, mixed lengths to judge the fit."""

from __future__ import annotations

import numpy as np

SHORTEST = 64
"""Tokens of the shortest sequences in the grid."""

NUM_HELD_OUT = 16
"""Micro-batches of mixed lengths that judge the fit."""

Lengths = tuple[int, ...]


def grid_of(max_tokens: int) -> list[Lengths]:
    """Micro-batches of one length each: lengths by powers of two, sequences by powers of four, and full ones."""
    grid: list[Lengths] = []
    length = SHORTEST
    while length <= max_tokens:
        counts = {4**power for power in range(16) if 4**power * length <= max_tokens} | {max_tokens // length}
        grid += [(length,) * count for count in sorted(counts)]
        length *= 2
    return grid


def mixed_microbatches(max_tokens: int, *, rng: np.random.Generator, num: int = NUM_HELD_OUT) -> list[Lengths]:
    """`num` micro-batches of lognormal lengths, filled to between an eighth of `max_tokens` and `max_tokens`.

    None holds one sequence alone, as the grid does.
    """
    microbatches: list[Lengths] = []
    for target in np.geomspace(max_tokens / 8, max_tokens, num):
        lengths: list[int] = []
        left = int(target)
        while left > 0:
            length = int(np.clip(rng.lognormal(np.log(max_tokens / 8), 1.0), 1, min(left, 3 * target / 4)))
            lengths.append(length)
            left -= length
        microbatches.append(tuple(lengths))
    return microbatches
