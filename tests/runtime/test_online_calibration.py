"""Ranks that measure different micro-batches agree on one cost model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_balance.calibration.online import CalibrationState, is_refit_step

TRUTH = (4e-4, 3e-5, 2e-6, 5e-10)  # seconds per micro-batch, sequence, token, squared token


def test_all_ranks_learn_the_same_and_it_is_the_truth(world4) -> None:
    states = world4.run("online_calibration", truth=TRUTH, num_rows=[40, 0, 25, 60], num_steps=5)
    assert all(state == states[0] for state in states)
    assert states[0]["num_steps"] == 5
    assert states[0]["error"] < 0.02
    assert states[0]["coefficients"][2:] == pytest.approx(TRUTH[2:], rel=0.05)


def test_too_few_measurements_leave_the_prior(world2) -> None:
    states = world2.run("online_calibration", truth=TRUTH, num_rows=[7, 0], num_steps=5)
    assert all(state["coefficients"] is None for state in states)


def test_before_the_first_refit_the_prior_plans(world2) -> None:
    states = world2.run("online_calibration", truth=TRUTH, num_rows=[40, 40], num_steps=4)
    assert all(state["coefficients"] is None for state in states)


def test_a_prior_that_is_right_but_for_its_unit_is_only_scaled(world2) -> None:
    # One length: four coefficients could not be told apart, and the fit must not pretend to.
    states = world2.run("online_calibration", truth=(0.0, 0.0, 1e-6, 1e-9), num_rows=[40, 40], num_steps=5, length=512)
    state = states[0]
    assert state["error"] < 0.02
    predicted = sum(c * x for c, x in zip(state["coefficients"], (1, 1, 512, 512**2), strict=True))
    assert predicted == pytest.approx(1e-6 * 512 + 1e-9 * 512**2, rel=0.02)


def test_the_schedule_of_refits() -> None:
    assert [step for step in range(300) if is_refit_step(step)] == [4, 8, 16, 32, 64, 128, 192, 256]


@pytest.mark.parametrize(
    "state", [CalibrationState(), CalibrationState(17, (0.1, 1 / 3, 2e-6, 4.9e-10), 0.0123)], ids=["fresh", "fitted"]
)
def test_a_state_reads_back_exactly(tmp_path: Path, state: CalibrationState) -> None:
    state.write(tmp_path / "new")
    assert CalibrationState.read(tmp_path / "new") == state
    json.loads((tmp_path / "new" / "online_calibration.json").read_text())
    assert CalibrationState.read(tmp_path) == CalibrationState()
