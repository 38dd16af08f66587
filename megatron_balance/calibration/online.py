"""A cost model that learns from the run's own micro-batches, the same on every rank.

Each rank keeps its own measurements. On a fixed schedule of steps rank 0 of the group gathers the newest
measurements of all ranks, fits them (`cost/fitting.py`), and broadcasts the coefficients, which every
rank turns into the same integers. The fit is validated: it is made on every other measurement and
must predict the rest better than the scaled prior does; otherwise the scaled prior is used.

With dynamic context parallelism, the cost of receiving a token's keys and values is one more coefficient. It is fitted
separately only if the measurements separate it from the others (`separates_exchange`) and the fit with it predicts the
rest better; otherwise it keeps the prior's ratio to the linear cost of a token.

Invariants: ranks agree on the cost model at every step; between refits it does not change; with the same
state and no new measurements, a resumed run makes the same plans as the run that saved it.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_balance.calibration.features import (
    NUM_FEATURES,
    RECEIVED,
    coefficients_of,
    cost_model_of,
    exchange_part,
)
from megatron_balance.cost.calibration import UNITS_PER_SECOND
from megatron_balance.cost.fitting import fit_seconds, relative_errors
from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.files.atomic_write import atomic_write
from megatron_balance.files.untrusted import parse_json
from megatron_balance.runtime.collectives import broadcast_row, gather_row

FIRST_REFIT = 4
"""Steps before the first refit; the gap then doubles, up to `LONGEST_GAP`."""

LONGEST_GAP = 64

MAX_MEASUREMENTS = 16384
"""Most measurements of all ranks in one refit: 0.6 MB, fitted in well under a second."""

MAX_MEASUREMENTS_OF_RANK = 512

MIN_MEASUREMENTS = 16
"""Fewer measurements do not determine the coefficients."""

LEAST_SEPARATE_PART = 0.01
"""Least part of the received tokens' sum of squares that no combination of the other features explains. Below it the
exchange cannot be separated from them, for example if all shared samples have the same length."""


_FILE = "online_calibration.json"


def is_refit_step(step: int) -> bool:
    """True if the cost model is fitted again before this step, counted from 0: 4, 8, 16, 32, 64, 128, 192, …"""
    if step >= LONGEST_GAP:
        return step % LONGEST_GAP == 0
    return step >= FIRST_REFIT and step & (step - 1) == 0


@dataclass(frozen=True)
class CalibrationState:
    """The state of the calibration in a checkpoint.

    Attributes:
        num_steps: planned steps.
        coefficients: `[4]` seconds per micro-batch, sequence, token and unit of attention, `[5]` where those per
            received token were learned as well; None before the first fit.
        error: median relative error on held-out measurements; None before the first fit.
    """

    num_steps: int = 0
    coefficients: tuple[float, ...] | None = None
    error: float | None = None

    def write(self, folder: Path) -> None:
        """Write it as JSON, whose numbers read back exactly."""
        with atomic_write(folder / _FILE) as file:
            file.write(f"{json.dumps(asdict(self))}\n".encode())

    @staticmethod
    def forget(folder: Path) -> None:
        """Remove the state that an earlier run may have written there."""
        (folder / _FILE).unlink(missing_ok=True)

    @classmethod
    def read(cls, folder: Path) -> CalibrationState:
        """Read the state; a new one if the run that saved did not calibrate.

        Raises:
            BalanceError: it cannot be read.
        """
        path = folder / _FILE
        if not path.exists():
            return cls()
        try:
            content = parse_json(path.read_text(encoding="utf-8"))
            coefficients, off_by = content["coefficients"], content["error"]
            if coefficients is not None and len(coefficients) not in (RECEIVED, NUM_FEATURES):
                raise ValueError(f"{len(coefficients)} coefficients instead of {RECEIVED} or {NUM_FEATURES}")
            return cls(
                num_steps=int(content["num_steps"]),
                coefficients=None if coefficients is None else tuple(map(float, coefficients)),
                error=None if off_by is None else float(off_by),
            )
        except (ArithmeticError, OSError, KeyError, TypeError, ValueError) as error:
            raise BalanceError(
                f"{path} is damaged or was written by another version ({error}): delete it to start calibration again."
            ) from error


class OnlineCalibration:
    """Online calibration on one rank.

    Args:
        prior: FLOPs or an earlier calibration: the cost model until the first fit, and the source of the shares
            of attention and of routed experts.
        group: all ranks that plan; CPU tensors travel over it.
    """

    def __init__(self, prior: CostModel, *, group: dist.ProcessGroup) -> None:
        self.prior = prior
        self.state = CalibrationState()
        self._group = group
        self._lock = threading.Lock()
        self._rows_per_rank = max(4, min(MAX_MEASUREMENTS_OF_RANK, MAX_MEASUREMENTS // group.size()))
        self._rows: deque[NDArray[np.float64]] = deque(maxlen=self._rows_per_rank)

    @property
    def cost_model(self) -> CostModel:
        """The cost model for planning the next step."""
        if self.state.coefficients is None:
            return self.prior
        coefficients = np.array(self.state.coefficients)
        return cost_model_of(coefficients, cost_model=self.prior, units_per_second=UNITS_PER_SECOND)

    def add(self, features: NDArray[np.float64], *, seconds: NDArray[np.float64]) -> None:
        """Add measurements of this rank; thread-safe.

        Args:
            features: `[num_measurements, 5]`, made with `prior`.
            seconds: `[num_measurements]`; values that are not above zero are left out.
        """
        kept = seconds > 0
        with self._lock:
            self._rows.extend(np.column_stack([features, seconds])[kept])

    def begin_step(self) -> None:
        """Begin the next step, with a refit on schedule. Collective over the group."""
        coefficients, error = self.state.coefficients, self.state.error
        if is_refit_step(self.state.num_steps):
            fitted = self._refit()
            if fitted is not None:
                coefficients, error = fitted
        self.state = CalibrationState(self.state.num_steps + 1, coefficients, error)

    def _refit(self) -> tuple[tuple[float, ...], float] | None:
        """Coefficients and held-out error from all ranks' measurements; None if there are too few."""
        rows = self._gather()
        # The last entry is the number of coefficients, 0 without a fit: every rank must take the same branch.
        message = np.zeros(NUM_FEATURES + 2)
        if rows is not None and len(rows) >= MIN_MEASUREMENTS:
            coefficients, error = fit_rows(rows, prior=self.prior)
            message[: coefficients.size] = coefficients
            message[NUM_FEATURES:] = error, coefficients.size
        message = broadcast_row(message, group=self._group, what="the fitted cost model (calibration)")
        *coefficients, error, num_fitted = message.tolist()
        return (tuple(coefficients[: int(num_fitted)]), error) if num_fitted else None

    def _gather(self) -> NDArray[np.float64] | None:
        """`[num_measurements, 6]` of all ranks on rank 0 of the group, None elsewhere."""
        share = np.zeros((self._rows_per_rank, NUM_FEATURES + 1))
        with self._lock:
            if self._rows:
                share[: len(self._rows)] = np.stack(list(self._rows))
        shares = gather_row(share.ravel(), group=self._group, what="measured seconds of all ranks (calibration)")
        if shares is None:
            return None
        rows = shares.reshape(-1, NUM_FEATURES + 1)
        return rows[rows[:, NUM_FEATURES] > 0]


def fit_rows(rows: NDArray[np.float64], *, prior: CostModel) -> tuple[NDArray[np.float64], float]:
    """Fit measurements.

    Args:
        rows: `[num_measurements, 6]` features, made with `prior`, and seconds.
        prior: FLOPs or an earlier calibration.

    Returns:
        `[4]` or `[5]` coefficients as in CalibrationState, and their median relative error on held-out measurements.
    """
    features, seconds = rows[:, :NUM_FEATURES], rows[:, NUM_FEATURES]
    even, odd = slice(0, None, 2), slice(1, None, 2)
    # Received tokens count at the prior's ratio to the linear cost; without dynamic sizes there are none.
    tied = features[:, :RECEIVED].copy()
    tied[:, 2] += exchange_part(prior) * features[:, RECEIVED]

    def fit_prior(part: slice) -> NDArray[np.float64]:
        own = coefficients_of(prior)[:RECEIVED]
        return own * fit_seconds((tied[part] @ own)[:, None], seconds=seconds[part])[0]

    def fit_tied(part: slice) -> NDArray[np.float64]:
        return fit_seconds(tied[part], seconds=seconds[part])

    def fit_free(part: slice) -> NDArray[np.float64]:
        return fit_seconds(features[part], seconds=seconds[part])

    ways = [(fit_prior, tied), (fit_tied, tied)]
    if separates_exchange(features[even], seconds=seconds[even]):
        ways.append((fit_free, features))
    errors = [
        float(np.median(relative_errors(inputs[odd], seconds=seconds[odd], coefficients=fit(even))))
        for fit, inputs in ways
    ]
    best = int(np.argmin(errors))
    return ways[best][0](slice(None)), errors[best]


def separates_exchange(features: NDArray[np.float64], *, seconds: NDArray[np.float64]) -> bool:
    """True if the measurements separate the cost of a received token from the other coefficients.

    Args:
        features: `[num_measurements, 5]`.
        seconds: `[num_measurements]`; their noise grows with their size.
    """
    weighted = features / np.sqrt(seconds)[:, None]
    others, received = weighted[:, :RECEIVED], weighted[:, RECEIVED]
    whole = float(received @ received)
    if whole == 0:
        return False
    scales = np.maximum(np.abs(others).max(axis=0), np.finfo(np.float64).tiny)
    explained = others / scales @ np.linalg.lstsq(others / scales, received, rcond=None)[0]
    return float(((received - explained) ** 2).sum()) > LEAST_SEPARATE_PART * whole
