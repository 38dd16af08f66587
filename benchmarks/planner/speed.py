"""Measures the speed of planning over verl's, at 8192 samples and 64 ranks: ratios of times of one run.

Three comparisons, all with verl's own functions:

    whole path      equal-size Karmarkar-Karp over ranks, then `rearrange_micro_batches` of all ranks
    what is waited  the same with one rank's `rearrange_micro_batches` (the middle of eight): verl's ranks work
                    side by side, so this is what a step waits for. Ours is the whole plan in both.
    free KK         Karmarkar-Karp of 8192 workloads into 64 parts

Where verl is not installed, this package's own plain-Python Karmarkar-Karp stands in for the last. It is far
quicker than verl's, so that ratio is a floor and no fair picture.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.planner.baselines import ours
from benchmarks.planner.measure import Timing, median_timing, timed
from benchmarks.planner.setups import Setup, timed_setup
from benchmarks.planner.wheels import LINEAR, least_num_microbatches, over_ranks, rearranger, verl_wheel
from megatron_balance.lengths.read import synthetic_lengths
from megatron_balance.planner.partition import karmarkar_karp

NUM_TIMED_RANKS = 8

AGAINST = (
    "verl's path, rearrange_micro_batches of all ranks",
    "verl's path, rearrange_micro_batches of one rank",
    "verl's free Karmarkar-Karp",
)
"""Functions of verl that are timed."""


@dataclass(frozen=True)
class SpeedRatio:
    """Our whole plan against something of another project."""

    against: str
    num_samples: int
    num_ranks: int
    ours_cpu_ms: float
    other_cpu_ms: float
    ratio: float
    wall_ratio: float


def speed_ratios(*, num_samples: int = 8192, num_ranks: int = 64) -> list[SpeedRatio]:
    """Times both sides in this process, one right after the other."""
    setup = timed_setup("speed", dp_size=num_ranks, cap=16384, num_samples=num_samples)
    drawn = synthetic_lengths("servegen_mlarge", num_samples=num_samples, seed=0)
    # Halved where a sample is longer than the cap, so that verl takes the batch.
    lengths = np.where(drawn > setup.cap, drawn // 2, drawn)
    ours(lengths, setup)
    ours_timing = median_timing([timed(lambda: ours(lengths, setup))[1] for _ in range(9)])

    tokens = lengths.tolist()
    workloads = [length**2 + LINEAR * length for length in tokens]
    try:
        verl_timings = _verl_timings(tokens, workloads=workloads, setup=setup)
    except ImportError:
        timings = [timed(lambda: karmarkar_karp(workloads, num_parts=num_ranks))[1] for _ in range(3)]
        stand_in = "free Karmarkar-Karp, this package's plain-Python one (verl is not installed)"
        return [_ratio(stand_in, setup=setup, ours_timing=ours_timing, other=median_timing(timings))]
    return [
        _ratio(against, setup=setup, ours_timing=ours_timing, other=timing) for against, timing in verl_timings.items()
    ]


def _verl_timings(tokens: list[int], *, workloads: list[int], setup: Setup) -> dict[str, Timing]:
    """Times of what `AGAINST` names."""
    from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

    num_ranks = setup.topology.dp_size
    lengths = np.array(tokens, dtype=np.int64)
    verl_wheel(lengths, setup)  # The first call pays for imports.
    whole = median_timing([timed(lambda: verl_wheel(lengths, setup))[1] for _ in range(3)])
    parts, dealing = timed(lambda: over_ranks(tokens, num_ranks=num_ranks))
    least = least_num_microbatches(tokens, parts=parts, cap=setup.cap)
    on_ranks: list[Timing] = []
    for part in parts[:NUM_TIMED_RANKS]:
        plan = rearranger([tokens[sample] for sample in part], cap=setup.cap)
        on_ranks.append(timed(lambda plan=plan: plan(least))[1])
    on_rank = median_timing(on_ranks)
    waited = Timing(dealing.wall_ms + on_rank.wall_ms, dealing.cpu_ms + on_rank.cpu_ms)
    free_kk = median_timing(
        [timed(lambda: get_seqlen_balanced_partitions(workloads, num_ranks, equal_size=False))[1] for _ in range(3)]
    )
    return dict(zip(AGAINST, (whole, waited, free_kk), strict=True))


def _ratio(against: str, *, setup: Setup, ours_timing: Timing, other: Timing) -> SpeedRatio:
    return SpeedRatio(
        against,
        num_samples=setup.global_batch_size,
        num_ranks=setup.topology.dp_size,
        ours_cpu_ms=ours_timing.cpu_ms,
        other_cpu_ms=other.cpu_ms,
        ratio=other.cpu_ms / ours_timing.cpu_ms,
        wall_ratio=other.wall_ms / ours_timing.wall_ms,
    )
