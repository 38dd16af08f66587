"""Writes the report as one HTML file that opens offline and contains all data.

The text is in assets/page.html, the drawing in page.js; this file computes what they show.

Invariants: the page loads nothing from elsewhere, and its Content-Security-Policy forbids it; text from the run
is escaped; what charts show is in its captions and tables as well.
"""

from __future__ import annotations

import json
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
        drawn=json.dumps(_imbalance(figures), separators=(",", ":")),
        style=_asset("style.css"),
        script=_asset("page.js"),
    )
    out.write_text(page, encoding="utf-8")


def _imbalance(figures: RunFigures) -> list[dict[str, Any]]:
    """The lines of the chart: imbalance over the steps, None where nothing was measured."""
    iterations = [step.iteration for step in figures.record.steps]
    lines: list[dict[str, Any]] = []
    for name, policy in figures.policies.items():
        values = [None if np.isnan(value) else round(float(value), 6) for value in policy.imbalance]
        lines.append({"name": TITLES[name], "colour": name, "x": iterations, "y": values})
    return lines


def _asset(name: str) -> str:
    return (resources.files("megatron_balance.report") / "assets" / name).read_text(encoding="utf-8")
