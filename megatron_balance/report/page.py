"""Writes the report as one HTML file that opens offline and contains plotly.js and all data.

The text is in assets/page.html; this file computes what it shows.

Invariants: the page loads nothing from elsewhere, and its Content-Security-Policy forbids it; text from the run
is escaped; what charts show is in its captions and tables as well.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from megatron_balance.errors import BalanceError
from megatron_balance.record import RunRecord, read_record
from megatron_balance.report.charts import TITLES, charts_of, cost_fit
from megatron_balance.report.figures import PolicyFigures, RunFigures, run_figures
from megatron_balance.report.timeline_data import timeline_data

NONE = "–"
"""A cell without a value."""


def write_report(run: RunRecord | Path, *, out: Path) -> Path:
    """Write the report of one run.

    Args:
        run: a record, its folder, or the file that `compare --json` wrote.
        out: file to write.

    Returns:
        The file.

    Raises:
        BalanceError: there is no run, it has no step, plotly or jinja2 is missing, or the file cannot be written.
    """
    record = read_record(run) if isinstance(run, Path) else run
    return write_page(run_figures(record), out=out)


def write_page(figures: RunFigures, *, out: Path) -> Path:
    """Write the page of a run that has been judged. Arguments and errors as `write_report`'s."""
    page = _render(figures)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise BalanceError(f"--out is {str(out)!r}: it cannot be written ({error.strerror}).") from error
    return out


def _render(figures: RunFigures) -> str:
    try:
        import jinja2
        from plotly.io import templates
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise BalanceError(
            f"the report is drawn with plotly and jinja2, and {error.name} is not installed: "
            "pip install 'megatron-balance[report]'."
        ) from error
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["script"] = _script
    fit = cost_fit(figures)
    charts = charts_of(figures, fit=fit)
    timelines, selection = timeline_data(figures)
    drawn = ",".join(f'{{"name":"{chart.name}","figure":{chart.figure.to_json()}}}' for chart in charts)
    themes = {name: templates[f"plotly_{name}"].to_plotly_json() for name in ("white", "dark")}
    planned = figures.policies["planned"]
    return environment.from_string(_asset("page.html")).render(
        figures=figures,
        info=figures.info,
        planned=planned,
        speed_up=_speed_up(figures),
        columns=[*(TITLES[name] for name in figures.policies), *(["measured"] if figures.is_measured else [])],
        rows=_rows(figures),
        floor=max(step.single_sample_floor for step in planned.metrics),
        nanmean=np.nanmean,
        fit=fit,
        charts=charts,
        selection=selection,
        timelines=timelines,
        drawn=f"[{drawn}]",
        themes=json.dumps(themes, separators=(",", ":")),
        style=_asset("style.css"),
        script=_asset("page.js"),
        plotly=get_plotlyjs(),
    )


def amount(value: float, *, unit: str) -> str:
    """A time or a cost with a readable unit: 12.3 ms, 4.56 PFLOP, 8,192 tokens."""
    if math.isnan(value):
        return NONE
    if unit == "tokens":
        return f"{value:,.0f} tokens"
    if value == 0:
        return f"0 {unit}"
    prefixes = {-9: "n", -6: "µ", -3: "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P", 18: "E", 21: "Z"}
    power = min(max(3 * math.floor(math.log10(abs(value)) / 3), -9), 0 if unit == "s" else 21)
    return f"{value / 10**power:.3g} {prefixes[power]}{unit}"


def _speed_up(figures: RunFigures) -> float:
    """Predicted time under stock over predicted time as planned, of all steps."""
    planned = float(figures.policies["planned"].times.sum())
    return float(figures.policies["stock"].times.sum()) / planned if planned else 1.0


def _rows(figures: RunFigures) -> list[list[str]]:
    """The table: the name of a figure, its value under each policy, and measured."""
    rows: list[list[str]] = []

    def add(name: str, value: Callable[[PolicyFigures], str], *, measured: str = NONE) -> None:
        cells = [value(policy) for policy in figures.policies.values()]
        rows.append([name, *cells, *([measured] if figures.is_measured else [])])

    def add_mean(name: str, metric: str, form: str, *, less: float = 0.0) -> None:
        add(name, lambda one: format(np.mean([getattr(step, metric) for step in one.metrics]) - less, form))

    known = figures.measured_imbalance[~np.isnan(figures.measured_imbalance)]
    seconds = float(np.nanmean(figures.measured_seconds)) if known.size else math.nan
    for name, of_steps in (("mean", np.mean), ("worst step", np.max)):
        label = f"imbalance (slowest / mean), {name}" if name == "mean" else f"imbalance, {name}"
        add(
            label,
            lambda one, of_steps=of_steps: f"{of_steps(one.imbalance):.3f}",
            measured=f"{of_steps(known):.3f}" if known.size else NONE,
        )
    unit = figures.scale.unit
    add("step, mean", lambda one: amount(float(one.times.mean()), unit=unit), measured=amount(seconds, unit="s"))
    add_mean("above the lower bound, mean", "over_bound", "+.2%", less=1)
    add_mean("micro-batches of a rank, mean", "num_microbatches", ".1f")
    add_mean("padding, mean", "padding_fraction", ".2%")
    if figures.info.limits.max_tokens_per_gpu is not None:
        add("room under the token cap, least", lambda one: f"{min(step.cap_headroom or 0 for step in one.metrics):.1%}")
    add("moved tokens, of all, mean", lambda one: _moved_part(figures, policy=one))
    for name, what in (("plan", "planning"), ("exchange", "moving samples"), ("exposed", "waiting for both")):
        spent = np.array([getattr(step, f"{name}_seconds") for step in figures.record.steps])
        if spent.any():
            rows.append([f"{what}, mean", *[NONE] * (len(rows[0]) - 2), amount(float(spent.mean()), unit="s")])
    return rows


def _moved_part(figures: RunFigures, *, policy: PolicyFigures) -> str:
    """Part of the tokens that moved; unknown where several ranks share a sample, as one loads it and all run it."""
    moved = [step.moved_tokens for step in policy.metrics if step.moved_tokens is not None]
    tokens = sum(int(step.segment_lengths.sum()) for step in figures.record.steps)
    return f"{sum(moved) / max(tokens, 1):.0%}" if len(moved) == len(policy.metrics) else NONE


def _asset(name: str) -> str:
    return (resources.files("megatron_balance.report") / "assets" / name).read_text(encoding="utf-8")


def _script(text: str) -> Any:
    """JSON that may stand inside a script element."""
    from markupsafe import Markup

    return Markup(text.replace("<", "\\u003c"))  # noqa: S704 (no tag can begin in it)
