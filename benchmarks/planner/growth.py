"""Measures how the time to plan grows with the number of samples, beside n log n."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.planner.baselines.ours import ours
from benchmarks.planner.measure import median_timing, timed
from benchmarks.planner.setups import timed_setup
from megatron_balance.lengths.read import synthetic_lengths

SAMPLES_PER_RANK = 64
MOST_RANKS = 4096
SIZES = (*(2**power for power in range(8, 20)), 10**6)
QUICK_SIZES = (2**8, 2**9, 2**10)
LARGE = 2**11


@dataclass(frozen=True)
class GrowthPoint:
    """Time to plan one global batch.

    Attributes:
        num_samples: samples in the global batch.
        dp_size: ranks.
        plan_wall_ms: median time, milliseconds.
        plan_cpu_ms: median of this process's own computing.
    """

    num_samples: int
    dp_size: int
    plan_wall_ms: float
    plan_cpu_ms: float


def plan_growth(sizes: tuple[int, ...], *, announce: Callable[[str], None]) -> list[GrowthPoint]:
    """Plans one batch of every size: five times where small, once where large."""
    points: list[GrowthPoint] = []
    for num_samples in sizes:
        dp_size = min(num_samples // SAMPLES_PER_RANK, MOST_RANKS)
        setup = timed_setup("growth", dp_size=dp_size, cap=32768, num_samples=num_samples)
        lengths = synthetic_lengths("servegen_mlarge", num_samples=num_samples, seed=0)
        repeats = 5 if num_samples <= 2**14 else 3 if num_samples <= 2**17 else 1
        timing = median_timing([timed(lambda batch=lengths, run=setup: ours(batch, run))[1] for _ in range(repeats)])
        points.append(GrowthPoint(num_samples, dp_size, timing.wall_ms, timing.cpu_ms))
        announce(f"growth: {num_samples} samples, {dp_size} ranks: {timing.cpu_ms:.0f} ms")
    return points


def growth_exponent(points: list[GrowthPoint]) -> float:
    """Slope of log time over log(n log n), least squares: 1.0 is n log n, less is slower growth.

    Over `LARGE` samples and up, where there are such points: smaller batches are refined, which costs more.
    """
    large = [point for point in points if point.num_samples >= LARGE]
    fitted = large if len(large) > 1 else points
    xs = [math.log(point.num_samples * math.log2(point.num_samples)) for point in fitted]
    ys = [math.log(max(point.plan_cpu_ms, 1e-3)) for point in fitted]
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / sum((x - x_mean) ** 2 for x in xs)


def draw_growth(points: list[GrowthPoint], file: Path) -> None:
    """Writes the plot as SVG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    # The same points give the same file, without the time of drawing.
    matplotlib.rcParams["svg.hashsalt"] = "megatron_balance"
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    sizes = [point.num_samples for point in points]
    middle = points[len(points) // 2]
    scale = middle.plan_cpu_ms / (middle.num_samples * math.log2(middle.num_samples))
    figure, axes = pyplot.subplots(figsize=(6.4, 4.2), layout="constrained")
    axes.loglog(sizes, [point.plan_cpu_ms for point in points], "o-", label="plan")
    axes.loglog(sizes, [scale * size * math.log2(size) for size in sizes], "--", color="gray", label="n log n")
    axes.set_xlabel(f"samples n ({SAMPLES_PER_RANK} a rank, at most {MOST_RANKS} ranks)")
    axes.set_ylabel("CPU time of one plan, ms")
    axes.grid(which="major", alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)
