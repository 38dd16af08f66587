"""Seconds of micro-batches, fitted to a run and kept in seconds.json.

    seconds = per_microbatch + per_sequence*n + linear*ΣL + Σ max(attention(L), cp_exchange*received(L))

with `attention(L) = quadratic*L² + Σ_w window_w*pairs(L, w)` as in a CostModel. FLOPs leave out how efficiently a
device runs them: attention and all that is linear reach different rates, and every launch costs time of its own.

Two ways are tried: one factor for the cost model that the run planned with, and coefficients of their own for launches,
sequences, tokens, attention and exchange. The terms of attention keep their proportions, since the lengths of a run
seldom separate them. Each way is fitted to some steps and judged on the others; the better is fitted to all.

Costs count attoseconds, so that integers keep six digits of every coefficient that matters; the file has seconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError

Floats = NDArray[np.float64]

FORMAT = "megatron_balance calibration 1"
"""Format name in the file; the number rises with incompatible changes."""

UNITS_PER_SECOND = 10**18
"""A cost of 1 is an attosecond: a squared token costs as little as 1e-15 seconds on the fastest devices."""

_COEFFICIENTS = ("per_microbatch", "per_sequence", "linear", "expert_linear", "quadratic", "cp_exchange")

LEAST_STEPS = 3
LEAST_MICROBATCHES = 10
MAX_FOLDS = 5

HUBER_THRESHOLD = 1.345
"""In standard deviations: 95 % as efficient as plain least squares where nothing disturbs (P. J. Huber, 1981)."""

MAX_ROUNDS = 30


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Time that a device takes, forward and backward, for the whole model on one rank.

    Attributes:
        costs: in attoseconds; `cp_exchange` is 0 where it was not measured.
        held_out_error: median relative error on micro-batches that were not fitted; None where none were kept.
        origin: conditions of the measurement: device, clock, versions, `longest_sequence`, the most tokens seen, and
            where FLOPs are known `linear_tflops` and `attention_tflops` of a GPU.
    """

    costs: CostModel
    held_out_error: float | None = None
    origin: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def extrapolation(self, longest: int) -> str:
        """A notice where sequences are longer than those that were measured; empty where they are not."""
        seen = self.origin.get("longest_sequence")
        if not isinstance(seen, int) or longest <= seen:
            return ""
        return f"the costs were measured on sequences of up to {seen} tokens: up to {longest} is extrapolated."

    def cost_model(self, *, ep_size: int = 1, model_parallel_size: int = 1) -> CostModel:
        """The costs of one of `model_parallel_size` ranks, tensor times context parallel.

        They share tokens and heads; each pays the fixed costs.
        """
        costs, own_experts = self.costs, ep_size == 1

        def share(cost: int) -> int:
            return round(cost / model_parallel_size)

        return replace(
            costs,
            linear=share(costs.linear + costs.expert_linear * own_experts),
            expert_linear=0 if own_experts else share(costs.expert_linear),
            quadratic=share(costs.quadratic),
            windows=tuple((window, share(cost)) for window, cost in costs.windows),
            cp_exchange=share(costs.cp_exchange),
        )

    def write(self, path: Path) -> None:
        """Write seconds.json."""
        seconds: dict[str, Any] = {name: getattr(self.costs, name) / UNITS_PER_SECOND for name in _COEFFICIENTS}
        seconds["windows"] = [(window, cost / UNITS_PER_SECOND) for window, cost in self.costs.windows]
        content = {"format": FORMAT, **seconds, "held_out_error": self.held_out_error, "origin": dict(self.origin)}
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Calibration:
        """Read seconds.json; a file that is none is refused."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BalanceError(
                f"the calibration {str(path)!r} cannot be read: {error}. Make one with megatron-balance fit."
            ) from error
        values = cast("dict[str, Any]", content if isinstance(content, dict) else {})
        if values.get("format") != FORMAT:
            raise BalanceError(
                f"{str(path)!r} does not say {FORMAT!r}: make it again with this version's megatron-balance fit."
            )
        try:
            # The exchange is null where it was not measured.
            costs = {name: round(values[name] * 1e18) for name in _COEFFICIENTS if values.get(name) is not None}
            windows = tuple((int(window), round(seconds * 1e18)) for window, seconds in values.get("windows", ()))
            held_out = values.get("held_out_error")
            return cls(
                costs=CostModel(**costs, windows=windows),
                held_out_error=None if held_out is None else float(held_out),
                origin=dict(values.get("origin", {})),
            )
        except (ArithmeticError, KeyError, TypeError, ValueError) as error:
            raise BalanceError(f"the calibration {str(path)!r} is damaged: {error}") from error


@dataclass(frozen=True, eq=False)
class Measurements:
    """Measured micro-batches, and the sequences of all slots that they may be of.

    `fixed` is `[num_measured, 3]` 1, sequences, tokens; `core` and `received` are of each sequence on each of its
    ranks: attention in units of the run's cost model, and tokens with keys and values that it gets from others.
    """

    seconds: Floats
    steps: NDArray[np.int64]
    slots: NDArray[np.int64]
    fixed: Floats
    slot_of: NDArray[np.int64]
    core: Floats
    received: Floats

    def features(self, exchange: float) -> Floats:
        """`[num_measured, 5]`: `fixed`, attention, and tokens whose `exchange`, in units of `core`, takes longer."""
        waits = exchange * self.received > self.core
        columns = [
            np.bincount(self.slot_of, weights=values, minlength=int(self.slots.max()) + 1)[self.slots]
            for values in (np.where(waits, 0.0, self.core), np.where(waits, self.received, 0.0))
        ]
        return np.column_stack([self.fixed, *columns])


@dataclass(frozen=True)
class Fit:
    """What was fitted: `[5]` seconds per micro-batch, sequence, token, unit of core, received token.

    `error` and `worst` are the median and largest relative error on steps that were not fitted. `scaled`: one factor
    was fitted, and attention keeps its ratio in the cost model. `rates`: of attention over the linear rate, as a
    multiple of the cost model's, the least and the most of the fits that leave some steps out.
    """

    coefficients: Floats
    error: float
    worst: float
    scaled: bool
    rates: tuple[float, float]


def fit_microbatches(measured: Measurements, *, cost_model: CostModel) -> Fit:
    """Fit measured micro-batches. `cost_model`: FLOPs, tokens or seconds that the run planned with."""
    seconds, (distinct, step_of) = measured.seconds, np.unique(measured.steps, return_inverse=True)
    if distinct.size < LEAST_STEPS or seconds.size < LEAST_MICROBATCHES:
        raise BalanceError(
            f"the record has {seconds.size} measured micro-batches in {distinct.size} steps: {LEAST_STEPS} steps of a "
            f"few micro-batches are enough, {LEAST_MICROBATCHES} in all; train a little longer."
        )
    linear = cost_model.linear + cost_model.expert_linear
    has_core = bool(cost_model.quadratic or cost_model.windows)
    exchange = float(cost_model.cp_exchange)
    own = np.array([cost_model.per_microbatch, cost_model.per_sequence, linear, float(has_core), exchange])

    def scaled(rows: NDArray[np.bool_]) -> Floats:
        return own * fit_seconds((measured.features(exchange)[rows] @ own)[:, None], seconds=seconds[rows])[0]

    def free(rows: NDArray[np.bool_]) -> Floats:
        shared, assumed, coefficients = measured.received > 0, exchange, np.zeros(5)
        if not exchange and shared.any():
            assumed = float(np.median(measured.core[shared] / measured.received[shared]))
        for _ in range(MAX_ROUNDS):
            features = measured.features(assumed)[rows]
            coefficients = fit_seconds(features, seconds=seconds[rows])
            if not features[:, 4].any() or not coefficients[3]:  # nothing tells the exchange
                coefficients[4] = assumed * coefficients[3]
            found = coefficients[4] / coefficients[3] if coefficients[3] else assumed
            if math.isclose(found, assumed, rel_tol=1e-6):
                break
            assumed = found
        return coefficients

    def predicted(coefficients: Floats) -> Floats:
        ratio = coefficients[4] / coefficients[3] if coefficients[3] else exchange
        return measured.features(ratio) @ coefficients

    num_folds = min(distinct.size, MAX_FOLDS)
    fold_of = step_of % num_folds
    ways: list[Callable[[NDArray[np.bool_]], Floats]] = [scaled, free]
    fits = [[way(fold_of != fold) for fold in range(num_folds)] for way in ways]
    errors: list[Floats] = []
    for of_way in fits:
        guesses = np.stack([predicted(coefficients) for coefficients in of_way])[fold_of, np.arange(seconds.size)]
        errors.append(np.abs(guesses / seconds - 1))
    best = int(np.argmin([of_way.mean() for of_way in errors]))
    rates = [float(each[2] / each[3] / linear) if each[3] and linear else math.inf for each in fits[1]]
    return Fit(
        ways[best](np.ones(seconds.size, dtype=np.bool_)),
        float(np.median(errors[best])),
        float(errors[best].max()),
        scaled=best == 0,
        rates=(min(rates), max(rates)),
    )


def fit_seconds(features: Floats, *, seconds: Floats) -> Floats:
    """Coefficients, none negative, that predict the seconds of micro-batches from their features. `[num_features]`

        minimise  Σ_i w_i (Σ_k coefficients_k*features_ik - seconds_i)² / seconds_i

    The variance of a measurement is taken to grow with its seconds, as where disturbances come at a steady rate. The
    weights are Huber's (Robust Estimation of a Location Parameter, 1964), by iteration: a measurement that something
    else disturbed counts less the further off it is. `features` are not negative, `seconds` above zero.

    Example:
        >>> fit_seconds(np.array([[1.0, 10], [1, 20], [1, 40]]), seconds=np.array([12.0, 22, 42])).round(6).tolist()
        [2.0, 1.0]
    """
    # Features and seconds of like size: the normal equations are then well conditioned.
    scales = features.max(axis=0)
    scales[scales == 0] = 1.0
    mean = float(seconds.mean())
    roots = np.sqrt(seconds / mean)
    rows, target = features / scales / roots[:, None], roots
    weights, coefficients = np.ones(seconds.size), np.zeros(features.shape[1])
    for _ in range(MAX_ROUNDS):
        before, coefficients = coefficients, _non_negative(rows, target=target, weights=weights)
        residuals = np.maximum(np.abs(rows @ coefficients - target), 1e-9)  # below that it is rounding
        weights = np.minimum(1.0, HUBER_THRESHOLD * 1.4826 * np.median(residuals) / residuals)
        if np.allclose(coefficients, before, rtol=1e-9, atol=0):
            break
    return coefficients * mean / scales


def _non_negative(rows: Floats, *, target: Floats, weights: Floats) -> Floats:
    """The non-negative `x` with the least `Σ weights*(rows @ x - target)²`: the best of all sets of positive ones."""
    gram, moments = (rows * weights[:, None]).T @ rows, rows.T @ (weights * target)
    best, best_gain = np.zeros(rows.shape[1]), 0.0
    for size in range(1, rows.shape[1] + 1):
        for chosen in map(list, combinations(range(rows.shape[1]), size)):
            solution: Floats = np.linalg.lstsq(gram[np.ix_(chosen, chosen)], moments[chosen], rcond=1e-12)[0]
            # The residual is Σ weights*target² - gain.
            gain = float(moments[chosen] @ solution)
            if (solution >= 0).all() and gain > best_gain * (1 + 1e-12):
                best, best_gain = np.zeros(rows.shape[1]), gain
                best[chosen] = solution
    return best
