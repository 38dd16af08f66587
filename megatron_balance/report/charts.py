"""Draws the charts of the page with plotly: imbalance and packing over steps, lengths, predicted against measured.

Invariant: every number drawn is in `RunFigures`; captions say which points are left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.report.fit import CostFit
from megatron_balance.report.length_bins import LengthBins
from megatron_balance.report.palette import LIGHT
from megatron_balance.report.run_figures import RunFigures
from megatron_balance.report.summary import amount

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

MAX_POINTS = 150
"""Most points of a line; a longer run is drawn as means over this many intervals of steps."""

_DASHES = {"stock": "dot", "planned": "solid", "measured": "solid", "beforehand": "dash", "idle": "dot"}
_SECONDS = "%{x:.3s}s predicted, %{y:.3s}s measured"


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        name: id in the page.
        heading: above it.
        caption: description with the main figures; screen readers read it in place of the chart.
        figure: plotly's.
    """

    name: str
    heading: str
    caption: str
    figure: Figure


def imbalance_chart(figures: RunFigures) -> Chart:
    """Slowest over mean, step by step: stock, planned, measured."""
    lines = {"stock": ("stock, predicted", figures.stock.imbalance)}
    if figures.beforehand is not None:
        lines["beforehand"] = ("planned beforehand", figures.beforehand.imbalance)
    lines["planned"] = ("planned", figures.planned.imbalance)
    if figures.is_measured:
        lines["measured"] = ("measured", figures.measured_imbalance)
    text = ", ".join(f"{label} {np.nanmean(values):.3f}" for label, values in lines.values())
    slowest = (
        "The slowest rank's time in each micro-batch, summed,"
        if figures.info.objective == "microbatch"
        else "The busiest rank's time"
    )
    return Chart(
        "imbalance",
        "Imbalance over the steps",
        f"{slowest} over the mean rank's; 1 is even. Means over the steps: {text}.",
        _lines(figures.iterations, lines, y_title="slowest / mean", y_format=".3f"),
    )


def packing_chart(figures: RunFigures) -> Chart:
    """Padding, and room under the token cap, step by step."""
    metrics = figures.planned.metrics
    padding = np.array([step.padding_fraction for step in metrics])
    lines = {"idle": ("padding", padding)}
    caption = f"Padding is {padding.mean():.2%} of the tokens run, on the mean."
    headroom = np.array([np.nan if step.cap_headroom is None else step.cap_headroom for step in metrics])
    if not np.isnan(headroom).all():
        lines["planned"] = ("room under the cap", headroom)
        caption += (
            f" The fullest micro-batch of a step leaves {headroom.mean():.2%} of the token cap free, "
            f"{headroom.min():.2%} at least"
            + ("; below zero one sample alone is longer than the cap." if headroom.min() < 0 else ".")
        )
    figure = _lines(figures.iterations, lines, y_title="", y_format=".2%")
    return Chart("packing", "Padding and headroom", caption, figure)


def lengths_chart(bins: LengthBins) -> Chart:
    """Distribution of samples and costs over lengths."""
    from plotly import graph_objects as go

    figure = go.Figure(layout=_layout(x_title="tokens of a sequence", y_title=""))
    for name, values, key in (("of the sequences", bins.counts, "idle"), ("of the cost", bins.costs, "costly")):
        figure.add_bar(
            x=list(bins.labels),
            y=np.round(values, 6),
            name=name,
            marker={"color": LIGHT[key]},
            hovertemplate="%{x} tokens: %{y:.1%} " + name + "<extra></extra>",
        )
    figure.update_layout(barmode="group", bargap=0.25, xaxis={"type": "category"}, yaxis={"tickformat": ".0%"})
    return Chart("lengths", "Lengths and their cost", bins.summary, figure)


def fit_chart(fit: CostFit) -> Chart:
    """Predicted against measured seconds of micro-batches."""
    figure = _against(
        {"micro-batches": (fit.predicted, fit.measured, LIGHT["measured"], "circle")},
        x_title="predicted seconds",
        y_title="measured seconds",
    )
    return Chart("fit", "Does the cost model predict the time?", fit.summary, figure)


def _against(points: dict[str, tuple[Any, Any, str, str]], *, x_title: str, y_title: str) -> Figure:
    """Points beside the diagonal, both axes logarithmic."""
    from plotly import graph_objects as go

    figure = go.Figure(layout=_layout(x_title=x_title, y_title=y_title))
    both = np.concatenate([np.concatenate([x, y]) for x, y, _, _ in points.values()])
    ends = [float(both.min()) / 1.2, float(both.max()) * 1.2]
    figure.add_scatter(
        x=ends, y=ends, mode="lines", name="equal", line={"color": LIGHT["muted"], "width": 1}, hoverinfo="skip"
    )
    for name, (x, y, colour, symbol) in points.items():
        figure.add_scatter(
            x=np.asarray(x, dtype=np.float32),
            y=np.asarray(y, dtype=np.float32),
            mode="markers",
            name=name,
            marker={"color": colour, "size": 5, "symbol": symbol, "opacity": 0.7},
            hovertemplate=_SECONDS + "<extra></extra>",
        )
    ticks = _log_ticks(*ends)
    axis = {"type": "log", "tickvals": ticks, "ticktext": [amount(tick, unit="s") for tick in ticks]}
    figure.update_layout(xaxis=axis, yaxis=axis)
    return figure


def _log_ticks(first: float, last: float) -> list[float]:
    """1, 2 and 5 times powers of ten; powers of ten alone where those are enough."""
    powers = [10.0**power for power in range(math.floor(math.log10(first)), math.ceil(math.log10(last)) + 1)]
    factors = (1, 2, 5) if last < 100 * first else (1,)
    return [factor * power for power in powers for factor in factors if first <= factor * power <= last]


def _lines(
    iterations: NDArray[np.int64],
    lines: dict[str, tuple[str, NDArray[np.float64]]],
    *,
    y_title: str,
    y_format: str,
) -> Figure:
    from plotly import graph_objects as go

    stretches = np.array_split(np.arange(iterations.size), min(iterations.size, MAX_POINTS))
    longest = max(map(len, stretches))
    figure = go.Figure(layout=_layout(x_title="step" if longest == 1 else f"step, means of {longest}", y_title=y_title))
    few = iterations.size < 40
    for key, (label, values) in lines.items():
        figure.add_scatter(
            x=np.array([iterations[stretch[0]] for stretch in stretches], dtype=np.int32),
            y=np.array([_mean(values[stretch]) for stretch in stretches], dtype=np.float32),
            name=label,
            mode="lines+markers" if few else "lines",
            line={"color": LIGHT[key], "dash": _DASHES[key], "width": 1.8},
            marker={"size": 5},
            hovertemplate=f"step %{{x}}: %{{y:{y_format}}} {label}<extra></extra>",
        )
    figure.update_layout(yaxis={"tickformat": y_format.replace(".3f", ".2f").replace(".2%", ".0%")})
    return figure


def _mean(values: NDArray[np.float64]) -> float:
    """Mean of the known values; NaN, drawn as a gap, without any."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")


def _layout(*, x_title: str, y_title: str) -> dict[str, Any]:
    return {
        "template": "none",
        "xaxis": {"title": {"text": x_title}},
        "yaxis": {"title": {"text": y_title}},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "xanchor": "left", "yanchor": "bottom"},
    }
