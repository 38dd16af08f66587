"""A short soak on the real training loop: files, threads and memory stay where they are."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.soak.growth import Slope
from benchmarks.soak.runs import NUM_RANKS, soak

NUM_STEPS = 60
SAMPLE_STEPS = 10

MAX_GROWTH_BYTES = 64 * 2**20
"""In half of the run, while allocators still meet the first long samples."""

MAX_GIVEN_OUT_BYTES = 4 * 2**20
"""Memory that malloc has given out varies with the samples that wait; by less than a megabyte here."""


@pytest.mark.slow
def test_nothing_is_held_on_to(tmp_path: Path) -> None:
    ranks = soak(tmp_path, balanced=True, num_steps=NUM_STEPS, sample_steps=SAMPLE_STEPS)
    assert len(ranks) == NUM_RANKS
    for samples in ranks:
        assert [sample["step"] for sample in samples] == [*range(SAMPLE_STEPS, NUM_STEPS + 1, SAMPLE_STEPS)]
        settled = samples[len(samples) // 2 - 1 :]
        assert all(sample["balanced"] and sample["refitted"] for sample in settled)
        assert len({sample["num_fds"] for sample in settled}) == 1
        assert len({sample["num_threads"] for sample in settled}) == 1
        assert settled[-1]["rss_bytes"] - settled[0]["rss_bytes"] < MAX_GROWTH_BYTES
        assert settled[-1]["malloc_bytes"] - settled[0]["malloc_bytes"] < MAX_GIVEN_OUT_BYTES


def test_a_slope_shows_a_leak_below_a_swing_and_is_not_moved_by_a_jump() -> None:
    steps = list(range(0, 800, 10))
    swing = [round(10_000 * math.sin(2 * math.pi * step / 200)) for step in steps]
    jump = Slope.of(
        steps, values=[9000 * (step >= 700) + up for step, up in zip(steps, swing, strict=True)], period=200
    )
    assert jump.per_step == 0
    leak = Slope.of(steps, values=[3 * step + up for step, up in zip(steps, swing, strict=True)], period=200)
    assert leak.per_step == pytest.approx(3, abs=0.01)
    # Samples that never meet the same point of a swing again are off by half their distance at most.
    coarse = list(range(0, 1000, 20))
    leak = Slope.of(
        coarse, values=[30 * step + round(1000 * math.sin(2 * math.pi * step / 256)) for step in coarse], period=256
    )
    assert leak.per_step == pytest.approx(30, abs=0.5)
