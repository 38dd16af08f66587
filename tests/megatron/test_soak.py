"""A short soak on the real training loop: files, threads and memory stay where they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.soak.growth import Slope
from benchmarks.soak.runs import NUM_RANKS, soak

NUM_STEPS = 60
SAMPLE_STEPS = 10

MAX_GROWTH_BYTES = 64 * 2**20
"""In half of the run, while allocators still meet the first long samples."""


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


def test_a_slope_is_not_moved_by_a_jump_and_shows_a_leak() -> None:
    steps = list(range(0, 400, 10))
    jump = Slope.of(steps, values=[1000 if step < 350 else 9000 for step in steps])
    assert jump.per_step == 0
    leak = Slope.of(steps, values=[3 * step + (step // 10) % 3 for step in steps])
    assert leak.per_step == pytest.approx(3, abs=0.02)
    assert 2.9 < leak.low <= leak.per_step <= leak.high < 3.1
