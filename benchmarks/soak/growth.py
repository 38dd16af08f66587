"""What a process held over a run → how fast it grew, in its second half, when caches and pools are full.

The slope is the median of the slopes of all pairs of samples (H. Theil 1950; P. K. Sen 1968), which a few jumps do
not move; its interval is Sen's, from Kendall's rank statistic.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_TWO_SIDED_95 = 1.96


@dataclass(frozen=True)
class Slope:
    """Growth a step.

    Attributes:
        per_step: the median slope.
        low, high: ends of its 95 % interval.
    """

    per_step: float
    low: float
    high: float

    @classmethod
    def of(cls, steps: Sequence[int], *, values: Sequence[int]) -> Slope:
        """Of a figure that was sampled.

        Args:
            steps: `[num_samples]`, rising.
            values: `[num_samples]`.
        """
        samples = list(zip(steps, values, strict=True))
        slopes = np.sort([(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in itertools.combinations(samples, 2)])
        num_samples, num_slopes = len(samples), len(slopes)
        reach = _TWO_SIDED_95 * math.sqrt(num_samples * (num_samples - 1) * (2 * num_samples + 5) / 18)
        low = max(0, int((num_slopes - reach) / 2))
        high = min(num_slopes - 1, math.ceil((num_slopes + reach) / 2))
        return cls(float(np.median(slopes)), low=float(slopes[low]), high=float(slopes[high]))


@dataclass(frozen=True)
class Growth:
    """Of one rank.

    Attributes:
        rss_bytes: resident memory.
        num_blocks: blocks of Python's allocator.
        rss_at_half, rss_at_end: bytes.
        num_fds, num_threads: most in the second half.
        more_fds, more_threads: that, above the most in the first half.
    """

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
        num_fds, num_threads = (max(sample[name] for sample in second) for name in ("num_fds", "num_threads"))
        return cls(
            rss_bytes=Slope.of(steps, values=[sample["rss_bytes"] for sample in second]),
            num_blocks=Slope.of(steps, values=[sample["num_blocks"] for sample in second]),
            rss_at_half=second[0]["rss_bytes"],
            rss_at_end=second[-1]["rss_bytes"],
            num_fds=num_fds,
            num_threads=num_threads,
            more_fds=num_fds - max(sample["num_fds"] for sample in first),
            more_threads=num_threads - max(sample["num_threads"] for sample in first),
        )
