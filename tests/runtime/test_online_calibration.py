"""Ranks that measure different micro-batches agree on one cost model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_balance.calibration.features import cost_model_of
from megatron_balance.calibration.online import CalibrationState, fit_rows, is_refit_step, separates_exchange
from megatron_balance.cost.model import CostModel

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
    # One length: four coefficients cannot be separated, and the fit must not pretend to.
    states = world2.run("online_calibration", truth=(0.0, 0.0, 1e-6, 1e-9), num_rows=[40, 40], num_steps=5, length=512)
    state = states[0]
    assert state["error"] < 0.02
    predicted = sum(c * x for c, x in zip(state["coefficients"], (1, 1, 512, 512**2), strict=True))
    assert predicted == pytest.approx(1e-6 * 512 + 1e-9 * 512**2, rel=0.02)


PRIOR = CostModel(linear=1000, quadratic=1, cp_exchange=10)


def shared_rows(lengths_of: Callable[[np.random.Generator], tuple[int, np.ndarray]], *, exchange: float) -> np.ndarray:
    """`[200, 6]` features and seconds of micro-batches of a size and lengths that are drawn."""
    rng = np.random.default_rng(3)
    rows = []
    for _ in range(200):
        size, lengths = lengths_of(rng)
        tokens, core = lengths.sum() / size, (lengths**2).sum() / size
        rows.append([1.0, lengths.size, tokens, core, tokens * (size - 1)])
    seconds = np.array(rows) @ np.array([*TRUTH, exchange]) * rng.normal(1, 0.005, len(rows))
    seconds[::9] *= 3
    return np.column_stack([rows, seconds])


def any_size(rng: np.random.Generator) -> tuple[int, np.ndarray]:
    return int(rng.choice([1, 2, 4])), rng.lognormal(6, 1, rng.integers(1, 12)).round()


def one_length_is_shared(rng: np.random.Generator) -> tuple[int, np.ndarray]:
    return (4, np.array([8192.0])) if rng.random() < 0.2 else (1, np.full(8, 512.0))


@pytest.mark.parametrize("exchange", [2e-8, 2e-7, 2e-6])
def test_a_known_exchange_is_learned(exchange: float) -> None:
    rows = shared_rows(any_size, exchange=exchange)
    coefficients, error = fit_rows(rows, prior=PRIOR)
    assert error < 0.02
    if exchange == 2e-8:  # 1 % of a token, as the prior has it
        learned = cost_model_of(coefficients, cost_model=PRIOR, units_per_second=10**18).cp_exchange / 1e18
        assert learned < 5e-8
    else:
        assert coefficients[4] == pytest.approx(exchange, rel=0.1)
        assert coefficients[2:4] == pytest.approx(TRUTH[2:], rel=0.05)


def test_an_exchange_that_nothing_separates_keeps_its_part_of_a_token() -> None:
    rows = shared_rows(one_length_is_shared, exchange=2e-7)
    assert not separates_exchange(rows[:, :5], seconds=rows[:, 5])
    coefficients, error = fit_rows(rows, prior=PRIOR)
    assert len(coefficients) == 4
    assert error < 0.02  # what is planned is still predicted
    model = cost_model_of(coefficients, cost_model=PRIOR, units_per_second=10**18)
    assert model.cp_exchange == pytest.approx(model.linear / 100)


def test_one_size_for_all_has_no_exchange_to_learn() -> None:
    rows = shared_rows(lambda rng: (1, any_size(rng)[1]), exchange=1.0)
    assert len(fit_rows(rows, prior=PRIOR)[0]) == 4


def test_the_schedule_of_refits() -> None:
    assert [step for step in range(300) if is_refit_step(step)] == [4, 8, 16, 32, 64, 128, 192, 256]


@pytest.mark.parametrize(
    "state",
    [
        CalibrationState(),
        CalibrationState(17, (0.1, 1 / 3, 2e-6, 4.9e-10), 0.0123),
        CalibrationState(17, (0.1, 1 / 3, 2e-6, 4.9e-10, 1e-8), 0.0123),
    ],
    ids=["fresh", "fitted", "with exchange"],
)
def test_a_state_reads_back_exactly(tmp_path: Path, state: CalibrationState) -> None:
    state.write(tmp_path / "new")
    assert CalibrationState.read(tmp_path / "new") == state
    json.loads((tmp_path / "new" / "online_calibration.json").read_text())
    assert CalibrationState.read(tmp_path) == CalibrationState()
