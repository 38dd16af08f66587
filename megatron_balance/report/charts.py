"""The charts of the page as plain numbers, which its script draws: imbalance, and predicted against measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron_balance.report.figures import RunFigures

TITLES = {"stock": "stock, predicted", "planned": "planned", "measured": "measured"}
"""Name of a policy in charts and tables."""

MAX_POINTS = 1500
"""Most micro-batches drawn; figures in captions are over all."""


class Chart(NamedTuple):
    """One chart: its axes and lines, and a caption with the main figures, which screen readers read in its place."""

    name: str
    heading: str
    caption: str
    x: dict[str, Any]
    y: dict[str, Any]
    lines: list[dict[str, Any]]


def charts_of(figures: RunFigures) -> list[Chart]:
    """The charts of the page, in order."""
    return [_imbalance(figures), *([_fit(figures)] if figures.predictions.size else [])]


def _imbalance(figures: RunFigures) -> Chart:
    iterations = [step.iteration for step in figures.record.steps]
    lines = [_line(TITLES[name], name, iterations, policy.imbalance) for name, policy in figures.policies.items()]
    means = {TITLES[name]: np.nanmean(policy.imbalance) for name, policy in figures.policies.items()}
    text = ", ".join(f"{title} {mean:.3f}" for title, mean in means.items())
    in_slots = figures.record.info.objective == "microbatch"
    slowest = "The slowest rank's time in each micro-batch, summed," if in_slots else "The busiest rank's time"
    return Chart(
        "imbalance",
        "Imbalance over the steps",
        f"{slowest} over the mean rank's; 1 is even. Means over the steps: {text}.",
        {"title": "step", "format": "count"},
        {"title": "slowest / mean", "format": "ratio"},
        lines,
    )


def _fit(figures: RunFigures) -> Chart:
    """Predicted against measured seconds, both axes logarithmic, beside the diagonal."""
    num_points = figures.predictions.shape[1]
    points = np.unique(np.linspace(0, num_points - 1, MAX_POINTS).astype(np.int64))
    predicted, measured = figures.predictions[:, points]
    ends = [min(predicted.min(), measured.min()) / 1.2, max(predicted.max(), measured.max()) * 1.2]
    caption = f"Off by {figures.median_error:.1%} (median) over {num_points:,} micro-batches. "
    caption += (
        "One factor, from cost to seconds, was fitted to this run; the rest is the cost model's error and noise."
        if figures.planned.scale.fitted
        else "Predictions are in seconds already; nothing was fitted to this run."
    )
    if figures.record.info.objective == "microbatch":
        caption += " Where ranks wait for one another inside a micro-batch, only the costliest of them is compared."
    return Chart(
        "fit",
        "Does the cost model predict the time?",
        caption,
        {"title": "predicted", "format": "seconds", "log": True},
        {"title": "measured", "format": "seconds", "log": True},
        [_line("equal", "neutral", ends, ends), _line("micro-batches", "measured", predicted, measured, kind="points")],
    )


def _line(name: str, colour: str, x: Any, y: Any, *, kind: str = "line") -> dict[str, Any]:
    """A line or points in a colour of style.css; y is None where nothing was measured."""

    def numbers(values: Sequence[float]) -> list[float | None]:
        return [None if np.isnan(value) else float(f"{value:.6g}") for value in values]

    return {"name": name, "colour": colour, "kind": kind, "x": numbers(x), "y": numbers(y)}
