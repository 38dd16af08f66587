"""Measures how fast the memory of a process grew in the second half of a run, when caches and pools are full.

Lengths swing up and down, and what is held swings with them. So samples are compared that are whole swings apart: the
slope is the median of those pairs' slopes (H. Theil 1950; P. K. Sen 1968; by season, R. M. Hirsch 1982), which a few
jumps do not move.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.soak import STEPS_PER_SWING


@dataclass(frozen=True)
class Slope:
    per_step: float
    low: float
    high: float

    @classmethod
    def of(cls, steps: Sequence[int], *, values: Sequence[int], period: int) -> Slope:
        """Of a figure that was sampled at even distances."""
        tolerance = (steps[1] - steps[0]) / 2
        slopes = []
        for (x0, y0), (x1, y1) in itertools.combinations(zip(steps, values, strict=True), 2):
            periods = round((x1 - x0) / period)
            if periods and abs(x1 - x0 - periods * period) <= tolerance:
                slopes.append((y1 - y0) / (x1 - x0))
        low, median, high = np.percentile(slopes, (25, 50, 75)).tolist()
        return cls(median, low=low, high=high)


@dataclass(frozen=True)
class Growth:
    malloc_bytes: Slope
    rss_bytes: Slope
    num_blocks: Slope
    rss_at_half: int
    rss_at_end: int
    num_fds: int
    num_threads: int
    more_fds: int
    more_threads: int

    @classmethod
    def of(cls, samples: Sequence[dict[str, int]]) -> Growth:
        """Of what `sampled.py` wrote on one rank."""
        first, second = samples[: len(samples) // 2], samples[len(samples) // 2 :]
        steps = [sample["step"] for sample in second]

        def slope_of(name: str) -> Slope:
            return Slope.of(steps, values=[sample[name] for sample in second], period=STEPS_PER_SWING)

        num_fds, num_threads = (max(sample[name] for sample in second) for name in ("num_fds", "num_threads"))
        return cls(
            malloc_bytes=slope_of("malloc_bytes"),
            rss_bytes=slope_of("rss_bytes"),
            num_blocks=slope_of("num_blocks"),
            rss_at_half=second[0]["rss_bytes"],
            rss_at_end=second[-1]["rss_bytes"],
            num_fds=num_fds,
            num_threads=num_threads,
            more_fds=num_fds - max(sample["num_fds"] for sample in first),
            more_threads=num_threads - max(sample["num_threads"] for sample in first),
        )
