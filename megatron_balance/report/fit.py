"""Compares predicted costs with measured seconds of micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_balance.report.run_figures import RunFigures
from megatron_balance.report.time_scale import TimeScale, is_measured, is_slowest

MAX_POINTS = 1500
"""Most micro-batches drawn; the median error is over all."""


@dataclass(frozen=True, eq=False)
class CostFit:
    """Measured micro-batches beside their predictions.

    Attributes:
        predicted: `[num_points]` seconds, of micro-batches spread evenly over all.
        measured: `[num_points]` seconds of the same.
        num_microbatches: measured ones, drawn or not.
        median_error: relative error, over all.
        summary: the fit in words.
    """

    predicted: NDArray[np.float64]
    measured: NDArray[np.float64]
    num_microbatches: int
    median_error: float
    summary: str


def cost_fit(figures: RunFigures) -> CostFit | None:
    """Compare every measured micro-batch with its prediction; None where there are none."""
    info, scale = figures.info, figures.scale
    pairs: list[NDArray[np.float64]] = []
    for step in figures.record.steps:
        if is_measured(step):
            chosen = is_slowest(step, info=info) & (step.cost_grid > 0)
            pairs.append(np.stack([scale.times(step)[chosen], step.seconds[chosen]]))
    if not sum(pair.shape[1] for pair in pairs):
        return None
    predicted, measured = np.concatenate(pairs, axis=1)
    error = float(np.median(np.abs(predicted / measured - 1)))
    shown = np.unique(np.linspace(0, predicted.size - 1, MAX_POINTS).astype(np.int64))
    drawn = f"; {shown.size:,} of them are drawn" if shown.size < predicted.size else ""
    return CostFit(
        predicted=predicted[shown],
        measured=measured[shown],
        num_microbatches=predicted.size,
        median_error=error,
        summary=f"Off by {error:.1%} (median) over {predicted.size:,} micro-batches{drawn}. {_about_scale(scale)}",
    )


def _about_scale(scale: TimeScale) -> str:
    of_what = (
        " Where ranks wait for one another inside a micro-batch, only the costliest of them is compared."
        if scale.info.objective == "microbatch"
        else ""
    )
    if scale.fitted:
        return (
            "One factor, from cost to seconds, was fitted to this run; the rest is the cost model's error and noise."
            f"{of_what}"
        )
    return f"Predictions are in seconds already; nothing was fitted to this run.{of_what}"
