"""A sweep as one HTML file that opens offline: throughput per GPU over the first axis, a line a policy.

Invariant: the chart shows the numbers of the table and no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from megatron_balance.cli.comparison.sweep import Axis, SweepPoint, relative_to
from megatron_balance.errors import BalanceError

_COLOURS = ("#8c959f", "#b45309", "#0b7a53", "#2456d6", "#7c3aed")
"""Colours of policies, in their order; they also differ in lightness."""

_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
"""Dashes of the second axis's values."""

_PAGE = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>body {{ margin: 1rem; font: 16px system-ui, sans-serif; background: #fff; color: #1b1f24; }}</style>
</head><body><h1>{title}</h1><p>{caption}</p>
{chart}
</body></html>
"""


def write_sweep_chart(
    path: Path, points: Sequence[SweepPoint], *, axes: Sequence[Axis], is_absolute: bool, caption: str
) -> None:
    """Draw a sweep.

    Args:
        path: file to write.
        points: of the sweep.
        axes: the swept sizes.
        is_absolute: throughput is in tokens per second; otherwise relative to stock at the first point.
        caption: text above the chart, with the assumptions.

    Raises:
        BalanceError: plotly is missing, or the file cannot be written.
    """
    try:
        import plotly.graph_objects as go
    except ModuleNotFoundError as error:
        raise BalanceError(
            f"--chart is drawn with plotly, and {error.name} is not installed: pip install 'megatron-balance[report]'."
        ) from error
    unit = "tokens/s per GPU" if is_absolute else "throughput per GPU, stock at the first point = 1"
    scale = 1.0 if is_absolute else relative_to(points)
    figure = go.Figure()
    for index, policy in enumerate(points[0].policies):
        for second, lines in enumerate(_lines(points)):
            label = policy.name if len(axes) == 1 else f"{policy.name}, {axes[1].name} {lines[0].values[1]}"
            shown = [point.policies[index] for point in lines]
            figure.add_scatter(
                x=[str(point.values[0]) for point in lines],
                y=[figures.tokens_per_second_per_gpu / scale for figures in shown],
                name=label,
                mode="lines+markers",
                line={"color": _COLOURS[index % len(_COLOURS)], "dash": _DASHES[second % len(_DASHES)]},
                customdata=[
                    [figures.speedup, figures.imbalance(point.waiting)]
                    for point, figures in zip(lines, shown, strict=True)
                ],
                hovertemplate="%{y:.4g}<br>%{customdata[0]:.2f}x stock<br>imbalance %{customdata[1]:.3f}",
            )
    figure.update_layout(
        template="plotly_white",
        hovermode="x unified",
        margin={"l": 60, "r": 20, "t": 20, "b": 60},
        xaxis={"title": axes[0].name, "type": "category"},
        yaxis={"title": unit, "rangemode": "tozero"},
        legend={"orientation": "h", "y": -0.2},
    )
    chart = figure.to_html(full_html=False, include_plotlyjs=True, config={"responsive": True, "displaylogo": False})
    title = "Throughput over " + " and ".join(axis.name for axis in axes)
    try:
        path.write_text(_PAGE.format(title=escape(title), caption=escape(caption), chart=chart), encoding="utf-8")
    except OSError as error:
        raise BalanceError(f"--chart is {str(path)!r}: it cannot be written ({error.strerror}).") from error


def _lines(points: Sequence[SweepPoint]) -> list[list[SweepPoint]]:
    """Points of one line each: those with the same value of the second axis."""
    lines: dict[tuple[int, ...], list[SweepPoint]] = {}
    for point in points:
        lines.setdefault(point.values[1:], []).append(point)
    return list(lines.values())
