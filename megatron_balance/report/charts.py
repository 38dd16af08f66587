"""Draws the charts of the page with plotly: imbalance over the steps, lengths, predicted against measured.

Charts have no theme: the page adds plotly's own for light and dark. A colour means the same in all charts and stands
out from both: orange is stock, blue is planned, green is measured. Stock is dotted as well, for readers
with colour blindness.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatron_balance.report.figures import RunFigures

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

COLOURS = {
    "stock": "#d97706",
    "planned": "#3b82f6",
    "measured": "#0f9d68",
    "neutral": "#8c959f",
}
TITLES = {"stock": "stock, predicted", "planned": "planned", "measured": "measured"}
"""Name of a policy in charts and tables."""

MAX_POINTS = 1500
"""Most micro-batches, and most lengths, drawn; figures in captions are over all."""


@dataclass(frozen=True)
class Chart:
    """One chart: its id, and a description with the main figures, which screen readers read in its place."""

    name: str
    heading: str
    caption: str
    figure: Figure


def charts_of(figures: RunFigures) -> list[Chart]:
    """The charts of the page, in order."""
    return [_imbalance(figures), _lengths(figures), *([_fit(figures)] if figures.predictions.size else [])]


def _imbalance(figures: RunFigures) -> Chart:
    figure = _figure(x="step", y="slowest / mean")
    for name, policy in figures.policies.items():
        figure.add_scatter(
            x=np.array([step.iteration for step in figures.record.steps], dtype=np.int32),
            y=policy.imbalance.astype(np.float32),
            name=TITLES[name],
            mode="lines+markers" if policy.imbalance.size < 40 else "lines",
            line={"color": COLOURS[name], "dash": "dot" if name == "stock" else "solid", "width": 1.8},
        )
    # Whole numbers of steps: plotly would halve them where there are few.
    steps = {"tickformat": ",d", **({"dtick": 1} if len(figures.record.steps) < 13 else {})}
    means = {TITLES[name]: np.nanmean(policy.imbalance) for name, policy in figures.policies.items()}
    text = ", ".join(f"{title} {mean:.3f}" for title, mean in means.items())
    in_slots = figures.record.info.objective == "microbatch"
    slowest = "The slowest rank's time in each micro-batch, summed," if in_slots else "The busiest rank's time"
    return Chart(
        "imbalance",
        "Imbalance over the steps",
        f"{slowest} over the mean rank's; 1 is even. Means over the steps: {text}.",
        figure.update_layout(yaxis_tickformat=".2f", xaxis=steps),
    )


def _lengths(figures: RunFigures) -> Chart:
    """Parts of the sequences and of the cost, by the run's first cost model, up to each length."""
    info = figures.record.info
    lengths, counts = np.unique(np.concatenate([step.segments for step in figures.record.steps]), return_counts=True)
    costs = np.array([float(info.cost_model(length)) for length in info.topology.padded_seq_len(lengths)])
    total, cumulative, costs_up_to = int(counts.sum()), np.cumsum(counts), np.cumsum(counts * costs)
    half = int(np.searchsorted(costs_up_to, costs_up_to[-1] / 2))
    # Of several sequences as long as this one, those that reach the half.
    longest = (
        cumulative[-1] - cumulative[half] + np.ceil((costs_up_to[half] - costs_up_to[-1] / 2) / (costs[half] or 1))
    )
    points = _points(lengths.size)
    figure = _figure(x="tokens of a sequence, at most", y="")
    parts = {"neutral": ("of the sequences", cumulative), "planned": ("of the cost", costs_up_to)}
    for name, (label, values) in parts.items():
        figure.add_scatter(
            x=lengths[points].astype(np.int32),
            y=(values[points] / max(float(values[-1]), 1.0)).astype(np.float32),
            name=label,
            line={"color": COLOURS[name], "shape": "hv"},
        )
    caption = (
        f"{total:,} sequences: median {lengths[np.searchsorted(cumulative, (total + 1) // 2)]:,}, mean "
        f"{float(lengths @ counts) / total:,.0f}, longest {lengths[-1]:,} tokens. The longest "
        f"{longest / total:.1%} of them make up half of the cost."
    )
    axis = {"type": "log", "tickformat": ",d", "dtick": "D2"}  # labels at 1, 2 and 5
    figure.update_layout(xaxis=axis, yaxis_tickformat=".0%", hovermode="x unified")
    return Chart("lengths", "Lengths and their cost", caption, figure)


def _fit(figures: RunFigures) -> Chart:
    """Predicted against measured seconds, both axes logarithmic, beside the diagonal."""
    num_points = figures.predictions.shape[1]
    predicted, measured = figures.predictions[:, _points(num_points)]
    figure = _figure(x="predicted", y="measured")
    ends = [min(predicted.min(), measured.min()) / 1.2, max(predicted.max(), measured.max()) * 1.2]
    figure.add_scatter(x=ends, y=ends, mode="lines", name="equal", line={"color": COLOURS["neutral"], "width": 1})
    figure.add_scatter(
        x=predicted.astype(np.float32),
        y=measured.astype(np.float32),
        mode="markers",
        name="micro-batches",
        marker={"color": COLOURS["measured"], "size": 5, "opacity": 0.7},
    )
    axis = {"type": "log", "tickformat": "~s", "ticksuffix": "s", "dtick": "D2"}
    figure.update_layout(xaxis=axis, yaxis=axis)
    caption = f"Off by {figures.median_error:.1%} (median) over {num_points:,} micro-batches. "
    caption += (
        "One factor, from cost to seconds, was fitted to this run; the rest is the cost model's error and noise."
        if figures.planned.scale.fitted
        else "Predictions are in seconds already; nothing was fitted to this run."
    )
    if figures.record.info.objective == "microbatch":
        caption += " Where ranks wait for one another inside a micro-batch, only the costliest of them is compared."
    return Chart("fit", "Does the cost model predict the time?", caption, figure)


def _points(size: int) -> NDArray[np.int64]:
    """Indices of at most MAX_POINTS values at even distances."""
    return np.unique(np.linspace(0, size - 1, MAX_POINTS).astype(np.int64))


def _figure(*, x: str, y: str) -> Figure:
    from plotly import graph_objects as go

    legend = {"orientation": "h", "x": 0, "y": 1.02, "xanchor": "left", "yanchor": "bottom"}
    return go.Figure(layout={"template": "none", "xaxis_title": x, "yaxis_title": y, "legend": legend})
