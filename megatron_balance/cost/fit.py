"""Fits seconds of micro-batches that a run has measured, as a cost model's terms.

    seconds ≈ per_microbatch + per_sequence*num_sequences + linear*tokens + attention*core + cp_exchange*received

`core` is the attention of the cost model, `Σ quadratic*L² + Σ_w window_w*pairs(L, w)`: its terms keep their proportions
in the model, since lengths of a run seldom separate them; without a model it is `ΣL²`. `received` are tokens with keys
and values from other context-parallel ranks under dynamic sizes: c ranks compute a c-th of tokens and core each, and
receive (c-1)/c of the tokens.

Three ways are tried: one factor for the whole cost model, free coefficients with the exchange at the model's ratio to
the linear cost, and all free. Each is fitted to some steps and judged on the others; the best is fitted to all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cost.fitting import fit_seconds, relative_errors
from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError

NUM_FEATURES = 5
RECEIVED = 4
LEAST_STEPS = 3
MAX_FOLDS = 5


@dataclass(frozen=True)
class Fit:
    """What was fitted.

    Attributes:
        coefficients: `[5]` seconds per micro-batch, sequence, token, unit of core, received token.
        error: median relative error on micro-batches of steps that were not fitted.
        worst: the largest such error.
        scaled: one factor was fitted: attention and the rest keep their ratio in the cost model.
    """

    coefficients: NDArray[np.float64]
    error: float
    worst: float
    scaled: bool


def core_of(lengths: NDArray[np.int64], *, cost_model: CostModel) -> NDArray[np.float64]:
    """`[num_sequences]` attention of each sequence, in the cost model's units; squared tokens where it has none."""
    if not cost_model.quadratic and not cost_model.windows:
        return lengths.astype(np.float64) ** 2
    attention = CostModel(quadratic=cost_model.quadratic, windows=cost_model.windows)
    unique, inverse = np.unique(lengths, return_inverse=True)
    return np.array([float(attention(length)) for length in unique.tolist()])[inverse]


def fit_microbatches(
    features: NDArray[np.float64], *, seconds: NDArray[np.float64], steps: NDArray[np.int64], cost_model: CostModel
) -> Fit:
    """Fit measured micro-batches.

    Args:
        features: `[num_measured, 5]`: 1, sequences, tokens, core, received tokens.
        seconds: `[num_measured]`, above zero.
        steps: `[num_measured]` the step of each.
        cost_model: FLOPs, tokens or seconds, by which `core` was computed.

    Raises:
        BalanceError: there are too few steps or micro-batches.
    """
    distinct = np.unique(steps)
    if distinct.size < LEAST_STEPS or seconds.size < 2 * LEAST_STEPS * NUM_FEATURES // 3:
        raise BalanceError(
            f"the record has {seconds.size} measured micro-batches in {distinct.size} steps: {LEAST_STEPS} steps of a "
            f"few micro-batches are enough, {2 * LEAST_STEPS * NUM_FEATURES // 3} in all; train a little longer."
        )
    linear = cost_model.linear + cost_model.expert_linear
    tied = features[:, :RECEIVED].copy()
    tied[:, 2] += features[:, RECEIVED] * (cost_model.cp_exchange / linear if linear else 0.0)
    has_core = bool(cost_model.quadratic or cost_model.windows)
    own = np.array([cost_model.per_microbatch, cost_model.per_sequence, linear, float(has_core)])

    def scaled(rows: NDArray[np.bool_]) -> NDArray[np.float64]:
        return own * fit_seconds((tied[rows] @ own)[:, None], seconds=seconds[rows])[0]

    def free(rows: NDArray[np.bool_]) -> NDArray[np.float64]:
        return fit_seconds(tied[rows], seconds=seconds[rows])

    def all_free(rows: NDArray[np.bool_]) -> NDArray[np.float64]:
        return fit_seconds(features[rows], seconds=seconds[rows])

    ways: list[tuple[Callable[[NDArray[np.bool_]], NDArray[np.float64]], NDArray[np.float64]]] = [(scaled, tied)]
    ways.append((free, tied))
    if features[:, RECEIVED].any():
        ways.append((all_free, features))
    fold_of = np.searchsorted(distinct, steps) % min(distinct.size, MAX_FOLDS)
    errors = [
        np.concatenate([_errors(way, inputs, seconds, fold_of == fold) for fold in range(int(fold_of.max()) + 1)])
        for way, inputs in ways
    ]
    best = int(np.argmin([of_way.mean() for of_way in errors]))
    coefficients = np.zeros(NUM_FEATURES)
    fitted = ways[best][0](np.ones(seconds.size, dtype=np.bool_))
    coefficients[: fitted.size] = fitted
    if fitted.size == RECEIVED and linear:
        coefficients[RECEIVED] = fitted[2] * cost_model.cp_exchange / linear
    return Fit(coefficients, float(np.median(errors[best])), float(errors[best].max()), scaled=best == 0)


def _errors(
    way: Callable[[NDArray[np.bool_]], NDArray[np.float64]],
    inputs: NDArray[np.float64],
    seconds: NDArray[np.float64],
    held_out: NDArray[np.bool_],
) -> NDArray[np.float64]:
    """Relative errors on the rows held out, of a fit to the others."""
    return relative_errors(inputs[held_out], seconds=seconds[held_out], coefficients=way(~held_out))
