"""Measurements of all ranks are gathered on one, and unknown ones stay unknown."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megatron_balance.runtime.rank_seconds import NOT_MEASURING, busiest_over_mean

NAN = float("nan")


def test_ranks_of_a_replica_count_together_and_others_not_at_all(world4) -> None:
    # Two pipeline stages of replica 1, one of replica 0, and a rank that only wants the result.
    gathered = world4.run(
        "rank_seconds",
        dp_ranks=[0, 1, 1, NOT_MEASURING],
        measured=[[1.0, 2.0, 3.0], [0.5, 0.25, 1.0], [0.5, NAN, 1.0], [9.0, 9.0, 9.0]],
        dp_size=2,
    )
    assert gathered[1:] == [None, None, None]
    np.testing.assert_array_equal(gathered[0], [[1.0, 2.0, 3.0], [1.0, NAN, 2.0]])


def test_a_group_of_one_needs_nobody(world1) -> None:
    assert world1.run("rank_seconds", dp_ranks=[0], measured=[[0.5]], dp_size=1) == [[[0.5]]]


def test_the_mean_over_known_steps() -> None:
    seconds = np.array([[3.0, 1.0, NAN, 0.0], [1.0, 1.0, 5.0, 0.0]])
    assert busiest_over_mean(seconds) == pytest.approx((1.5 + 1.0) / 2)
    assert math.isnan(busiest_over_mean(seconds[:, 2:]))
