"""Fits seconds as a non-negative combination of a micro-batch's features, by robust least squares.

    minimise  Σ_i w_i (Σ_k coefficients_k*features_ik - seconds_i)² / seconds_i,   coefficients >= 0

The variance of a measurement is taken to grow with its seconds, as it does where disturbances come at a steady
rate. A step is a sum of micro-batches, and this division also makes the least error in sums: relative residuals
fit short micro-batches at the expense of the full ones that most of a step's time goes to.

The weights are Huber's (P. J. Huber, Robust Estimation of a Location Parameter, 1964), by iteration: a measurement
that something else disturbed counts less the further off it is. With as few coefficients as here, the non-negative
least squares problem is solved exactly, by trying every set of coefficients that may be above zero.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError

HUBER_THRESHOLD = 1.345
"""In standard deviations: 95 % as efficient as plain least squares where nothing disturbs (Huber 1981)."""

MAX_FEATURES = 8
"""2**8 sets of coefficients are looked at in each of at most `MAX_ROUNDS` rounds."""

MAX_ROUNDS = 30

_LEAST_SCALE = 1e-9
"""A relative error this small is rounding, not disturbance."""


def fit_seconds(features: NDArray[np.float64], *, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Fits the coefficients that predict the seconds of micro-batches from their features.

    Args:
        features: `[num_measurements, num_features]`, not negative, e.g. 1, sequences, tokens, squared tokens.
        seconds: `[num_measurements]`, above zero.

    Returns:
        `[num_features]` seconds per unit of each feature, none negative.

    Raises:
        BalanceError: fewer measurements than features, too many features, or seconds that are not above zero.

    Example:
        >>> features = np.array([[1.0, 10.0], [1.0, 20.0], [1.0, 40.0]])
        >>> fit_seconds(features, seconds=np.array([12.0, 22.0, 42.0])).round(6).tolist()
        [2.0, 1.0]
    """
    num_measurements, num_features = features.shape
    if num_measurements < num_features or num_features > MAX_FEATURES:
        raise BalanceError(
            f"fit_seconds has {num_measurements} measurements of {num_features} features: it needs at least as many "
            f"measurements, and at most {MAX_FEATURES} features."
        )
    if not (np.isfinite(seconds).all() and (seconds > 0).all()):
        raise BalanceError("fit_seconds needs seconds that are finite and above zero: measure those again.")
    # Features and seconds of like size: the normal equations are then well conditioned.
    scales = features.max(axis=0)
    scales[scales == 0] = 1.0
    mean = float(seconds.mean())
    roots = np.sqrt(seconds / mean)
    target = seconds / mean / roots
    rows = features / scales / roots[:, None]
    weights = np.ones(num_measurements)
    coefficients = np.zeros(num_features)
    for _ in range(MAX_ROUNDS):
        before = coefficients
        coefficients = _non_negative_least_squares(rows, target=target, weights=weights)
        residuals = np.abs(rows @ coefficients - target)
        spread = max(1.4826 * float(np.median(residuals)), _LEAST_SCALE)
        weights = np.minimum(1.0, HUBER_THRESHOLD * spread / np.maximum(residuals, _LEAST_SCALE))
        if np.allclose(coefficients, before, rtol=1e-9, atol=0):
            break
    return coefficients * mean / scales


def relative_errors(
    features: NDArray[np.float64], *, seconds: NDArray[np.float64], coefficients: NDArray[np.float64]
) -> NDArray[np.float64]:
    """`[num_measurements]` relative errors of predictions, over the measured seconds."""
    return np.abs(features @ coefficients / seconds - 1)


def _non_negative_least_squares(
    rows: NDArray[np.float64], *, target: NDArray[np.float64], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The non-negative `x` with the least `Σ weights*(rows @ x - target)²`.

    At the optimum the positive coefficients solve their own unconstrained problem, so the best of all sets
    whose solution is positive is it. Ties keep the smaller set, then the first.
    """
    gram = (rows * weights[:, None]).T @ rows
    moments = rows.T @ (weights * target)
    num_features = rows.shape[1]
    best = np.zeros(num_features)
    best_gain = 0.0
    for size in range(1, num_features + 1):
        for chosen in combinations(range(num_features), size):
            index = np.array(chosen)
            solution: NDArray[np.float64] = np.linalg.lstsq(gram[np.ix_(index, index)], moments[index], rcond=1e-12)[0]
            if (solution < 0).any():
                continue
            # The residual is Σ weights*target² - gain; lstsq solves the normal equations, so the gain is this product.
            gain = float(moments[index] @ solution)
            if gain > best_gain * (1 + 1e-12):
                best = np.zeros(num_features)
                best[index] = solution
                best_gain = gain
    return best
