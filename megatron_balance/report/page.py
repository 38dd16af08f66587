"""Writes the report as one HTML file that opens offline and contains plotly.js and all data.

Invariants: the page loads nothing from elsewhere, and its Content-Security-Policy forbids it; text from the run
is escaped; what charts show is in its captions and tables as well.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
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
from megatron_balance.report.palette import DARK, LIGHT
from megatron_balance.report.run_figures import RunFigures, run_figures
from megatron_balance.report.summary import summarize
from megatron_balance.report.timeline_data import timeline_data


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
        BalanceError: plotly or jinja2 is missing.
    """
    try:
        import jinja2
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise BalanceError(
            f"the report is drawn with plotly and jinja2, and {error.name} is not installed: "
            "pip install 'megatron-balance[report]'."
        ) from error
    fit = cost_fit(figures)
    summary = summarize(figures, fit=fit)
    charts = _charts(figures, fit=fit)
    timelines = timeline_data(figures)
    environment = jinja2.Environment(autoescape=True)
    environment.filters |= {"script": _script, "variables": _variables}
    return environment.from_string(_asset("page.html")).render(
        summary=summary,
        charts=charts,
        timelines=timelines,
        figures="["
        + ",".join(f'{{"name":"{chart.name}","figure":{chart.figure.to_json()}}}' for chart in charts)
        + "]",
        light=LIGHT,
        dark=DARK,
        style=_asset("style.css"),
        script=_asset("page.js"),
        plotly=get_plotlyjs(),
    )


def _charts(figures: RunFigures, *, fit: CostFit | None) -> list[Chart]:
    charts = [imbalance_chart(figures), lengths_chart(length_bins(figures))]
    if fit is not None:
        charts.append(fit_chart(fit))
    return [*charts, packing_chart(figures)]


def _asset(name: str) -> str:
    return (resources.files("megatron_balance.report") / "assets" / name).read_text(encoding="utf-8")


def _script(text: str) -> Any:
    """JSON that may stand inside a script element."""
    from markupsafe import Markup

    return Markup(text.replace("<", "\\u003c"))  # noqa: S704 (no tag can begin in it)


def _variables(colours: dict[str, str]) -> str:
    """Declarations of the colours for a style sheet."""
    return " ".join(f"--{name}: {value};" for name, value in colours.items())
