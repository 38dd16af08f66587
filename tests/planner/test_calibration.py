"""Seconds fitted from measurements, and the cost models made of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance import BalanceError, CostModel, Limits, Topology, build_data_schedule
from megatron_balance.cost.calibration import Calibration
from megatron_balance.cost.fitting import fit_seconds, relative_errors
from megatron_balance.cost.resolve import resolve_cost

TRUTH = np.array([3e-4, 2e-5, 1e-6, 4e-10])
CALIBRATION = Calibration(
    per_microbatch=3e-4,
    per_sequence=2e-5,
    linear=1e-6,
    expert_linear=5e-7,
    quadratic=4e-10,
    windows=((128, 2e-9),),
    cp_exchange=1e-7,
    held_out_error=0.02,
    origin={"device": "a test"},
)


def microbatches(*, num: int, seed: int) -> np.ndarray:
    """Features `[num, 4]` of micro-batches of lognormal lengths."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(num):
        lengths = np.clip(rng.lognormal(6, 1.2, rng.integers(1, 20)), 1, 8192).round()
        rows.append([1.0, lengths.size, lengths.sum(), (lengths**2).sum()])
    return np.array(rows)


def test_exact_measurements_give_the_coefficients_back() -> None:
    features = microbatches(num=60, seed=0)
    np.testing.assert_allclose(fit_seconds(features, seconds=features @ TRUTH), TRUTH, rtol=1e-6)


def test_what_is_known_is_left_out_of_the_fit() -> None:
    features = microbatches(num=60, seed=0)
    rest = np.array([0.0, 0.0, 1.0, 0.0])
    fitted = fit_seconds(features[:, 2:3], seconds=features @ TRUTH, known=features @ (TRUTH * (1 - rest)))
    np.testing.assert_allclose(fitted, TRUTH[2:3], rtol=1e-6)
    # Less than what is known: nothing is left, and nothing is negative.
    assert fit_seconds(features[:, 2:3], seconds=features @ TRUTH, known=2 * features @ TRUTH) == 0


def test_disturbed_measurements_hardly_move_the_fit() -> None:
    features = microbatches(num=200, seed=1)
    rng = np.random.default_rng(2)
    seconds = features @ TRUTH * rng.normal(1, 0.01, 200)
    seconds[::10] *= rng.uniform(2, 6, 20)  # every tenth ran while something else did
    fitted = fit_seconds(features, seconds=seconds)
    fresh = microbatches(num=100, seed=3)
    robust = np.median(relative_errors(fresh, seconds=fresh @ TRUTH, coefficients=fitted))
    assert robust < 0.005
    plain = np.linalg.lstsq(features / seconds[:, None], np.ones(200), rcond=None)[0]
    assert np.median(relative_errors(fresh, seconds=fresh @ TRUTH, coefficients=plain)) > 4 * robust


def test_where_the_form_does_not_fit_the_sum_of_a_step_still_does() -> None:
    """Tokens past a cache's size cost half as much again: no coefficient expresses that."""
    grid = np.array([[1.0, n, n * length, n * length**2] for length in 2 ** np.arange(6, 13) for n in (1, 4, 16, 64)])
    grid = grid[grid[:, 2] <= 4096]

    def seconds_of(features: np.ndarray) -> np.ndarray:
        return features @ TRUTH + TRUTH[2] / 2 * np.maximum(features[:, 2] - 1024, 0)

    fresh = microbatches(num=100, seed=4)
    fresh = fresh[fresh[:, 2] <= 4096]
    relative = np.linalg.lstsq(grid / seconds_of(grid)[:, None], np.ones(len(grid)), rcond=None)[0]

    def error_of_sum(coefficients: np.ndarray) -> float:
        return abs((fresh @ coefficients).sum() / seconds_of(fresh).sum() - 1)

    fitted = fit_seconds(grid, seconds=seconds_of(grid))
    assert error_of_sum(fitted) < min(0.01, 0.5 * error_of_sum(relative))


@given(st.lists(st.lists(st.floats(0.01, 10), min_size=3, max_size=3), min_size=4, max_size=12), st.integers(0, 99))
def test_the_fit_is_never_negative_and_no_single_feature_beats_it(rows: list[list[float]], seed: int) -> None:
    features = np.array(rows)
    seconds = np.random.default_rng(seed).uniform(0.5, 2, len(rows))
    fitted = fit_seconds(features, seconds=seconds)
    assert (fitted >= 0).all()
    assert fitted.any()


@pytest.mark.parametrize(
    ("features", "seconds", "message"),
    [
        (np.ones((2, 3)), np.ones(2), "2 measurements of 3 features"),
        (np.ones((9, 9)), np.ones(9), "at most 8 features"),
        (np.ones((3, 2)), np.array([1.0, 0.0, 1.0]), "above zero"),
        (np.ones((3, 2)), np.array([1.0, np.nan, 1.0]), "above zero"),
    ],
)
def test_what_cannot_be_fitted_is_named(features: np.ndarray, seconds: np.ndarray, message: str) -> None:
    with pytest.raises(BalanceError, match=message):
        fit_seconds(features, seconds=seconds)


def test_a_calibration_reads_back_what_was_written(tmp_path: Path) -> None:
    CALIBRATION.write(tmp_path / "calibration.json")
    assert Calibration.read(tmp_path / "calibration.json") == CALIBRATION


def test_the_cost_model_is_the_calibration_in_attoseconds() -> None:
    lengths = [1, 100, 500, 8000]
    model = CALIBRATION.cost_model()
    seconds = 3e-4 + sum(2e-5 + 1.5e-6 * n + 4e-10 * n**2 for n in lengths)
    seconds += 2e-9 * (1**2 + 100**2 + (256 * 500 - 128 * 127) + (256 * 8000 - 128 * 127))
    assert (model.per_microbatch + sum(map(model, lengths))) / 1e18 == pytest.approx(seconds, rel=1e-9)
    assert CALIBRATION(lengths) == pytest.approx(seconds, rel=1e-9)


def test_a_file_without_the_exchange_is_read(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    CALIBRATION.write(path)
    content = json.loads(path.read_text())
    del content["cp_exchange"], content["cp_exchange_between_nodes"]
    path.write_text(json.dumps(content))
    assert Calibration.read(path) == replace(CALIBRATION, cp_exchange=None)


def test_the_exchange_is_that_of_the_link() -> None:
    both = replace(CALIBRATION, cp_exchange_between_nodes=8e-7)
    assert both.cost_model().cp_exchange == 1e11
    assert both.cost_model(between_nodes=True, model_parallel_size=4).cp_exchange == 2e11
    assert CALIBRATION.cost_model(between_nodes=True).cp_exchange == 0
    assert CALIBRATION.exchange_seconds(between_nodes=True) is None


def test_parallel_ranks_share_tokens_but_not_launches() -> None:
    whole, shared = CALIBRATION.cost_model(), CALIBRATION.cost_model(ep_size=8, model_parallel_size=4)
    assert shared.linear * 4 == pytest.approx(1e12, abs=4)
    assert shared.expert_linear * 4 == pytest.approx(5e11, abs=4)
    assert whole.linear == shared.linear * 4 + shared.expert_linear * 4
    assert (shared.per_microbatch, shared.per_sequence) == (whole.per_microbatch, whole.per_sequence)


def test_a_path_names_a_calibration_where_a_cost_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    CALIBRATION.write(path)
    assert resolve_cost(str(path), ep_size=2) == CALIBRATION.cost_model(ep_size=2)
    assert resolve_cost() == CostModel.tokens()


def test_launches_make_a_plan_of_fewer_micro_batches() -> None:
    lengths = [1000] * 6 + [10] * 40
    counts = {
        per_microbatch: build_data_schedule(
            lengths,
            cost_model=CostModel(linear=1, per_microbatch=per_microbatch),
            topology=Topology(2),
            limits=Limits(2000),
        ).num_microbatches
        for per_microbatch in (0, 10_000)
    }
    assert counts[10_000] == 2
    assert counts[10_000] <= counts[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json", "cannot be read"),
        ("[]", "does not say"),
        (json.dumps({"format": "megatron_balance calibration 0"}), "does not say"),
        (json.dumps({"format": "megatron_balance calibration 1", "linear": "fast"}), "linear is 'fast'"),
        (json.dumps({"format": "megatron_balance calibration 1"}), "no coefficient above zero"),
        (json.dumps({"format": "megatron_balance calibration 1", "linear": 1, "windows": [3]}), "damaged"),
        (json.dumps({"format": "megatron_balance calibration 1", "linear": 1, "cp_exchange": -1}), "cp_exchange is -1"),
    ],
)
def test_a_file_that_is_no_calibration_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(content)
    with pytest.raises(BalanceError, match=message):
        Calibration.read(path)
    with pytest.raises(BalanceError, match=r"missing\.json"):
        Calibration.read(tmp_path / "missing.json")


def test_negative_seconds_are_refused() -> None:
    with pytest.raises(BalanceError, match=r"Calibration.linear is -1.0: it must be a number of seconds"):
        replace(CALIBRATION, linear=-1.0)
