"""A cost model that learns from the run's own micro-batches, the same on every rank.

Each rank keeps what it measured. On a fixed schedule of steps rank 0 of the group gathers the newest
measurements of all ranks, fits them (`cost/fitting.py`), and broadcasts the coefficients, which every
rank turns into the same integers. The fit must prove itself: it is made on every other measurement and
must predict the rest better than the scaled prior does; otherwise the scaled prior stays.

Where micro-batches have context-parallel sizes of their own, what receiving a token's keys and values costs is one
coefficient more. It is fitted by itself only where the measurements tell it from the others (`separates_exchange`) and
predict the rest better with it; otherwise it keeps the prior's part of what a token costs.

Invariants: ranks agree on the cost model at every step; between refits it does not change; with the same
state and no new measurements, a resumed run plans as the one that saved it.
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
"""Gathered for one refit, over all ranks: 0.6 MB, fitted in well under a second."""

MAX_MEASUREMENTS_OF_RANK = 512

MIN_MEASUREMENTS = 16
"""Fewer do not determine the coefficients."""

LEAST_SEPARATE_PART = 0.01
"""Of the received tokens' sum of squares, the part that no combination of the other features explains: below it the
exchange cannot be told from them, as where all samples that ranks share have the same length."""


_FILE = "online_calibration.json"


def is_refit_step(step: int) -> bool:
    """Whether the cost model is fitted anew before this step, counted from 0: 4, 8, 16, 32, 64, 128, 192, …"""
    if step >= LONGEST_GAP:
        return step % LONGEST_GAP == 0
    return step >= FIRST_REFIT and step & (step - 1) == 0


@dataclass(frozen=True)
class CalibrationState:
    """What a checkpoint keeps.

    Attributes:
        num_steps: steps that were planned.
        coefficients: `[4]` seconds per micro-batch, sequence, token and unit of attention, `[5]` where those per
            received token were learned as well; None before the first fit.
        error: median relative error on the measurements that were held out; None likewise.
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
        """Remove what an earlier run may have written there."""
        (folder / _FILE).unlink(missing_ok=True)

    @classmethod
    def read(cls, folder: Path) -> CalibrationState:
        """Read it back; a fresh state where the run that saved did not calibrate.

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
                raise ValueError(f"{len(coefficients)} coefficients in place of {RECEIVED} or {NUM_FEATURES}")
            return cls(
                num_steps=int(content["num_steps"]),
                coefficients=None if coefficients is None else tuple(map(float, coefficients)),
                error=None if off_by is None else float(off_by),
            )
        except (ArithmeticError, OSError, KeyError, TypeError, ValueError) as error:
            raise BalanceError(
                f"{path} is damaged or was written by another version ({error}): delete it, and the run learns anew."
            ) from error


class OnlineCalibration:
    """One rank's part.

    Args:
        prior: FLOPs or an earlier calibration: plans until there is a fit, and gives the shares of
            attention and of routed experts apart.
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
        """What the next step is planned with."""
        if self.state.coefficients is None:
            return self.prior
        coefficients = np.array(self.state.coefficients)
        return cost_model_of(coefficients, cost_model=self.prior, units_per_second=UNITS_PER_SECOND)

    def add(self, features: NDArray[np.float64], *, seconds: NDArray[np.float64]) -> None:
        """Take in what this rank measured; any thread may.

        Args:
            features: `[num_measurements, 5]`, made with `prior`.
            seconds: `[num_measurements]`; those that are not above zero are left out.
        """
        kept = seconds > 0
        with self._lock:
            self._rows.extend(np.column_stack([features, seconds])[kept])

    def begin_step(self) -> None:
        """Go on to the next step, and refit where one is due. All ranks of the group, in the same order."""
        coefficients, error = self.state.coefficients, self.state.error
        if is_refit_step(self.state.num_steps):
            fitted = self._refit()
            if fitted is not None:
                coefficients, error = fitted
        self.state = CalibrationState(self.state.num_steps + 1, coefficients, error)

    def _refit(self) -> tuple[tuple[float, ...], float] | None:
        """Coefficients and held-out error, from all ranks' measurements; None where there are too few."""
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
        `[4]` or `[5]` coefficients as in CalibrationState, and their median relative error on measurements that they
        were not made from.
    """
    features, seconds = rows[:, :NUM_FEATURES], rows[:, NUM_FEATURES]
    even, odd = slice(0, None, 2), slice(1, None, 2)
    # Received tokens at the prior's part of what a token costs: without sizes of their own, none.
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
    """Whether measurements tell what receiving a token costs from the other coefficients.

    Args:
        features: `[num_measurements, 5]`.
        seconds: `[num_measurements]`, whose fluctuations grow with them.
    """
    weighted = features / np.sqrt(seconds)[:, None]
    others, received = weighted[:, :RECEIVED], weighted[:, RECEIVED]
    whole = float(received @ received)
    if whole == 0:
        return False
    scales = np.maximum(np.abs(others).max(axis=0), np.finfo(np.float64).tiny)
    explained = others / scales @ np.linalg.lstsq(others / scales, received, rcond=None)[0]
    return float(((received - explained) ** 2).sum()) > LEAST_SEPARATE_PART * whole
