"""Writes the report as one HTML file that opens offline and contains all data.

The text is in assets/page.html, the drawing in page.js; this file computes what they show.

Invariants: the page loads nothing from elsewhere, and its Content-Security-Policy forbids it; text from the run
is escaped; what charts show is in its captions and tables as well.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from megatron_balance.errors import BalanceError
from megatron_balance.record.fit import NOTABLE_ERROR
from megatron_balance.report.figures import RunFigures
from megatron_balance.report.timelines import timeline_data

TITLES = {"stock": "stock, predicted", "planned": "planned", "measured": "measured"}
"""Name of a policy in charts and tables."""

MAX_POINTS = 1500
"""Most micro-batches drawn in a chart; figures in captions are over all."""


def write_page(figures: RunFigures, *, out: Path, peak: float | None = None, speedup: float | None = None) -> None:
    """Write the page of a run, with the MFU where the `peak` of a GPU is given, TFLOP/s.

    `speedup`: of whole steps over stock ones, where both were measured.
    """
    try:
        import jinja2
        from markupsafe import Markup
    except ModuleNotFoundError as error:
        raise BalanceError(
            f"the report needs jinja2, and {error.name} is not installed: pip install '.[report]' in a clone."
        ) from error

    def script(text: str) -> Markup:
        """JSON that may stand inside a script element."""
        return Markup(text.replace("<", "\\u003c"))  # noqa: S704 (no tag can begin in it)

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["script"] = script
    timelines, selection = timeline_data(figures)
    stock, planned = figures.policies["stock"], figures.planned
    batches = [step.lengths.size for step in figures.record.steps]
    page = environment.from_string(_asset("page.html")).render(
        figures=figures,
        info=figures.record.info,
        stock=stock,
        planned=planned,
        predicted_speedup=float(stock.times.sum() / planned.times.sum()) if planned.times.any() else 1.0,
        speedup=speedup,
        columns=[TITLES[name] for name in figures.policies],
        peak=peak,
        batch=" to ".join(f"{size:,}" for size in sorted({min(batches), max(batches)})),
        unavoidable=max(step.unavoidable_waiting for step in planned.metrics),
        notable_error=NOTABLE_ERROR,
        nanmean=np.nanmean,
        nanmax=np.nanmax,
        isfinite=np.isfinite,
        selection=selection,
        timelines=timelines,
        drawn=json.dumps(_charts(figures), separators=(",", ":")),
        style=_asset("style.css"),
        script=_asset("page.js"),
    )
    out.write_text(page, encoding="utf-8")


def _charts(figures: RunFigures) -> dict[str, list[dict[str, Any]]]:
    """The lines of each chart: imbalance over the steps, and predicted against measured seconds beside the diagonal."""
    iterations = [step.iteration for step in figures.record.steps]
    policies = figures.policies.items()
    charts = {"imbalance": [_line(TITLES[name], name, iterations, policy.imbalance) for name, policy in policies]}
    if figures.predictions.size:
        points = np.unique(np.linspace(0, figures.predictions.shape[1] - 1, MAX_POINTS).astype(np.int64))
        predicted, measured = figures.predictions[:, points]
        ends = [min(predicted.min(), measured.min()) / 1.2, max(predicted.max(), measured.max()) * 1.2]
        micro_batches = _line("micro-batches", "measured", predicted, measured, kind="points")
        charts["fit"] = [_line("equal", "neutral", ends, ends), micro_batches]
    return charts


def _line(name: str, colour: str, x: Any, y: Any, *, kind: str = "line") -> dict[str, Any]:
    """A line or points in a colour of style.css; y is None where nothing was measured."""

    def numbers(values: Sequence[float]) -> list[float | None]:
        return [None if np.isnan(value) else float(f"{value:.6g}") for value in values]

    return {"name": name, "colour": colour, "kind": kind, "x": numbers(x), "y": numbers(y)}


def _asset(name: str) -> str:
    return (resources.files("megatron_balance.report") / "assets" / name).read_text(encoding="utf-8")
