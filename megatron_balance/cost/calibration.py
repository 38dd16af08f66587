"""Fits the coefficients of a cost model to measured seconds, and keeps them in the file seconds.json.

    seconds = per_microbatch + linear*ΣL + Σ max(attention(L), cp_exchange*received(L))

with `attention(L) = quadratic*L² + Σ_w window_w*pairs(L, w)` as in a CostModel. FLOPs leave out how efficiently a
device runs them: attention and all that is linear reach different rates, and launches cost time of their own. The terms
of attention keep their proportions, since the lengths of a run seldom separate them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError

Floats = NDArray[np.float64]

FORMAT = "megatron_balance calibration 2"
"""Format name in the file; the number rises with incompatible changes."""

UNITS_PER_SECOND = 10**18
"""A cost of 1 is an attosecond: a squared token costs as little as 1e-15 seconds on the fastest devices."""

LEAST_STEPS = 3
LEAST_MICROBATCHES = 10
MAX_FOLDS = 5

HUBER_THRESHOLD = 1.345
"""In standard deviations: 95 % as efficient as plain least squares where nothing disturbs (P. J. Huber, 1981)."""

ROUNDS = 12

RATE_SPREAD = 0.6
"""How far, as a logarithm, attention's rate over that of all else is expected to be from what the run planned with."""

EXCHANGE_SPREAD = 1.5
"""The same for the exchange, which a link's speed gave. A run that shows neither keeps what it planned with."""


@dataclass(frozen=True)
class Calibration:
    """Time that a device takes, forward and backward, for the whole model on one rank.

    Attributes:
        costs: in attoseconds; `cp_exchange` is 0 where it was not measured.
        held_out_error: median relative error on micro-batches that were not fitted; None if none were kept.
        origin: conditions of the measurement: device, clock, versions, `longest_sequence`, the most tokens seen, and
            where FLOPs are known `linear_tflops` and `attention_tflops` of a GPU.
    """

    costs: CostModel
    held_out_error: float | None = None
    origin: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def extrapolation(self, longest: int) -> str:
        """A notice where sequences are longer than those that were measured; empty where they are not."""
        measured = self.origin.get("longest_sequence", longest)
        notice = f"the costs were measured on sequences of up to {measured} tokens: up to {longest} is extrapolated."
        return notice if longest > measured else ""

    def cost_model(self, *, ep_size: int = 1) -> CostModel:
        """The costs of the whole model on one rank, those of experts apart where ranks share them."""
        if ep_size > 1:
            return self.costs
        return replace(self.costs, linear=self.costs.linear + self.costs.expert_linear, expert_linear=0)

    def write(self, path: Path) -> None:
        """Write seconds.json."""
        content = {"format": FORMAT, "held_out_error": self.held_out_error, "attoseconds": asdict(self.costs)}
        path.write_text(json.dumps(content | {"origin": dict(self.origin)}, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Calibration:
        """Read seconds.json; a file that is none is refused."""
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise ValueError(f"it is of the format {content['format']!r}")
            return cls(CostModel.from_dict(content["attoseconds"]), content["held_out_error"], dict(content["origin"]))
        except (ArithmeticError, KeyError, OSError, RecursionError, TypeError, ValueError) as error:
            raise BalanceError(
                f"the calibration {str(path)!r} cannot be read as {FORMAT!r}: {error}. Make it with this version's "
                "megatron-balance fit."
            ) from error


@dataclass(frozen=True, eq=False)
class Measurements:
    """Measured micro-batches, and the sequences of all slots that they may be of.

    `tokens` are those of each measured micro-batch; `core` and `received` are of each sequence on each of its ranks:
    attention in units of the run's cost model, and tokens with keys and values that it gets from others.
    """

    seconds: Floats
    steps: NDArray[np.int64]
    slots: NDArray[np.int64]
    tokens: Floats
    microbatch_of: NDArray[np.int64]
    core: Floats
    received: Floats

    def features(self, exchange: float) -> Floats:
        """`[num_measured, 3]`: 1, tokens, and attention or, where it takes longer, `exchange` a received token."""
        longer = np.maximum(self.core, exchange * self.received)
        core = np.bincount(self.microbatch_of, weights=longer, minlength=int(self.slots.max()) + 1)
        return np.column_stack([np.ones_like(self.tokens), self.tokens, core[self.slots]])


@dataclass(frozen=True)
class Fit:
    """What was fitted: `[3]` seconds per micro-batch, token and unit of core, and the exchange in units of core.

    `error` is the median relative error on steps that were not fitted; `planned_error` that of the costs which the run
    planned with, at the one rate that fits them.
    """

    coefficients: Floats
    exchange: float
    error: float
    planned_error: float


def fit_microbatches(measured: Measurements, *, cost_model: CostModel) -> Fit:
    """Fit measured micro-batches. `cost_model`: FLOPs, tokens or seconds that the run planned with."""
    seconds, (distinct, step_of) = measured.seconds, np.unique(measured.steps, return_inverse=True)
    if distinct.size < LEAST_STEPS or seconds.size < LEAST_MICROBATCHES:
        raise BalanceError(
            f"the record has {seconds.size} measured micro-batches in {distinct.size} steps: {LEAST_STEPS} steps of a "
            f"few micro-batches are enough, {LEAST_MICROBATCHES} in all; train a little longer."
        )
    linear, shared = cost_model.linear + cost_model.expert_linear, measured.received > 0
    ratio = 1 / linear if linear and (cost_model.quadratic or cost_model.windows) else None
    planned = float(cost_model.cp_exchange)
    if shared.any():
        planned = planned or float(np.median(measured.core[shared] / measured.received[shared]))

    def fitted(rows: NDArray[np.bool_], exchange: float) -> tuple[float, Floats, float]:
        """How unlikely the fit with an exchange is, where errors follow Laplace's distribution; and the fit."""
        features = measured.features(exchange)[rows]
        coefficients = fit_seconds(features, seconds=seconds[rows], ratio=ratio)
        error = float(np.abs(features @ coefficients / seconds[rows] - 1).mean()) + 1e-9
        moved = math.log(exchange / planned) / EXCHANGE_SPREAD if planned else 0.0
        return int(rows.sum()) * math.log(error) + moved**2 / 2, coefficients, exchange

    def best(rows: NDArray[np.bool_]) -> tuple[Floats, float]:
        quarters = range(-20, 21) if shared.any() else [0]  # of octaves
        return min((fitted(rows, planned * 2 ** (step / 4)) for step in quarters), key=lambda fit: fit[0])[1:]

    errors = np.zeros_like(seconds)
    for fold in range(min(MAX_FOLDS, distinct.size)):
        left_out = step_of % MAX_FOLDS == fold
        coefficients, exchange = best(~left_out)
        errors[left_out] = (measured.features(exchange) @ coefficients / seconds - 1)[left_out]
    coefficients, exchange = best(np.ones_like(seconds, dtype=np.bool_))
    costs = measured.features(planned) @ [cost_model.per_microbatch, linear, ratio is not None or not linear]
    rates = seconds / costs
    planned_error = np.median(np.abs(np.median(rates) / rates - 1))
    return Fit(coefficients, exchange, float(np.median(np.abs(errors))), float(planned_error))


def fit_seconds(features: Floats, *, seconds: Floats, ratio: float | None = None) -> Floats:
    """Coefficients, none negative, that predict the seconds of micro-batches from their features. `[num_features]`

        minimise  Σ_i w_i (Σ_k coefficients_k*features_ik - seconds_i)² / seconds_i

    The variance of a measurement is taken to grow with its seconds, as where disturbances come at a steady rate. The
    weights are Huber's (Robust Estimation of a Location Parameter, 1964), by iteration: a measurement that something
    else disturbed counts less the further off it is. `features` are not negative, `seconds` above zero. `ratio` is what
    the last coefficient is expected to be of the one before: one more measurement, off by `RATE_SPREAD`.

    Examples:
        >>> fit_seconds(np.array([[1.0, 10], [1, 20], [1, 40]]), seconds=np.array([12.0, 22, 42])).round(6).tolist()
        [2.0, 1.0]
    """
    scales = np.maximum(features.max(axis=0), 1e-300)  # in units of like size the equations are well conditioned
    mean = float(seconds.mean())
    roots = np.sqrt(seconds / mean)
    rows, expected = features / scales / roots[:, None], np.zeros((1, features.shape[1]))
    if ratio is not None:
        per_unit = seconds.sum() / (features[:, -2:] @ [1.0, ratio]).sum() / mean
        expected[0, -2:] = np.array([-1, 1 / ratio]) / per_unit / scales[-2:]
    weights, coefficients, spread = np.ones_like(seconds), np.zeros(features.shape[1]), 0.0
    for _ in range(ROUNDS):
        weighted = np.concatenate([rows * weights[:, None], spread / RATE_SPREAD * expected])
        coefficients = _non_negative(weighted, target=np.append(roots * weights, 0.0))
        residuals = np.maximum(np.abs(rows @ coefficients - roots), 1e-9)  # below that it is rounding
        spread = 1.4826 * float(np.median(residuals))
        weights = np.sqrt(np.minimum(1.0, HUBER_THRESHOLD * spread / residuals))
    return coefficients * mean / scales


def _non_negative(rows: Floats, *, target: Floats) -> Floats:
    """Least squares by the columns that come out positive; the most negative is left out first."""
    chosen = np.ones(rows.shape[1])
    while True:
        result: Floats = np.linalg.lstsq(rows * chosen, target, rcond=1e-12)[0] * chosen
        if (result >= 0).all():
            return result
        chosen[result.argmin()] = 0.0
