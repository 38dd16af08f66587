"""Writes the report as one HTML file that opens offline and contains plotly.js and all data.

Invariants: the page loads nothing from elsewhere, and its Content-Security-Policy forbids it; text from the run
is escaped; what charts show is in its captions and tables as well.
"""

from __future__ import annotations

import json
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from megatron_balance.errors import BalanceError
from megatron_balance.record import RunRecord, read_record
from megatron_balance.report.charts import (
    Chart,
    fit_chart,
    imbalance_chart,
    lengths_chart,
    packing_chart,
)
from megatron_balance.report.fit import CostFit, cost_fit
from megatron_balance.report.length_bins import length_bins
from megatron_balance.report.palette import DARK, LIGHT, css_variables
from megatron_balance.report.run_figures import RunFigures, run_figures
from megatron_balance.report.summary import Summary, summarize
from megatron_balance.report.timeline_data import timeline_data


def write_report(run: RunRecord | Path, *, out: Path) -> Path:
    """Write the report of one run.

    Args:
        run: a record, its folder, or the file that `compare --json` wrote.
        out: file to write.

    Returns:
        The file.

    Raises:
        BalanceError: there is no run, it has no step, plotly is missing, or the file cannot be written.
    """
    record = read_record(run) if isinstance(run, Path) else run
    return write_page(run_figures(record), out=out)


def write_page(figures: RunFigures, *, out: Path) -> Path:
    """Write the page of a run that has been judged. Arguments and errors as `write_report`'s."""
    page = render(figures)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise BalanceError(f"--out is {str(out)!r}: it cannot be written ({error.strerror}).") from error
    return out


def render(figures: RunFigures) -> str:
    """The page as text.

    Raises:
        BalanceError: plotly is missing.
    """
    plotly = _plotly()
    fit = cost_fit(figures)
    summary = summarize(figures, fit=fit)
    charts = _charts(figures, fit=fit)
    timelines = timeline_data(figures)
    return Template(_asset("page.html")).substitute(
        title=escape(summary.title),
        light=css_variables(LIGHT),
        dark=css_variables(DARK),
        style=_asset("style.css"),
        facts="".join(f"<li>{escape(fact)}</li>" for fact in summary.facts),
        tiles=_tiles(summary),
        table=_table(summary),
        notes='<ul class="notes">' + "".join(f"<li>{escape(note)}</li>" for note in summary.notes) + "</ul>",
        timeline_note=escape(timelines.note),
        charts="\n".join(_section(chart) for chart in charts),
        palettes=_script_json({"light": LIGHT, "dark": DARK}),
        timelines=_safe(timelines.text),
        figures=_safe("[" + ",".join(_figure(chart) for chart in charts) + "]"),
        plotly=plotly,
        script=_asset("page.js"),
    )


def _charts(figures: RunFigures, *, fit: CostFit | None) -> list[Chart]:
    charts = [imbalance_chart(figures), lengths_chart(length_bins(figures))]
    if fit is not None:
        charts.append(fit_chart(fit))
    return [*charts, packing_chart(figures)]


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise BalanceError(
            f"the report is drawn with plotly, and {error.name} is not installed: "
            "pip install 'megatron-balance[report]'."
        ) from error
    return get_plotlyjs()


def _asset(name: str) -> str:
    return (resources.files("megatron_balance.report") / "assets" / name).read_text(encoding="utf-8")


def _tiles(summary: Summary) -> str:
    return "".join(
        f'<div><dt>{escape(name)}</dt><dd class="value">{escape(value)}</dd><dd>{escape(meaning)}</dd></div>'
        for name, value, meaning in summary.tiles
    )


def _table(summary: Summary) -> str:
    first, *others = summary.columns
    head = f"<td>{escape(first)}</td>" + "".join(f'<th scope="col">{escape(name)}</th>' for name in others)
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
        for name, *cells in summary.rows
    )
    return f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody>"


def _section(chart: Chart) -> str:
    heading = f"{chart.name}-heading"
    return (
        f'<section aria-labelledby="{heading}"><h2 id="{heading}">{escape(chart.heading)}</h2>'
        f'<figure><div id="{chart.name}" class="chart" role="img" aria-labelledby="{heading}" '
        f'aria-describedby="{chart.name}-caption"></div>'
        f'<figcaption id="{chart.name}-caption">{escape(chart.caption)}</figcaption></figure></section>'
    )


def _figure(chart: Chart) -> str:
    return json.dumps({"name": chart.name}, separators=(",", ":"))[:-1] + f',"figure":{chart.figure.to_json()}}}'


def _script_json(content: Any) -> str:
    return _safe(json.dumps(content, separators=(",", ":")))


def _safe(text: str) -> str:
    """JSON that may stand inside a script element."""
    return text.replace("<", "\\u003c")
