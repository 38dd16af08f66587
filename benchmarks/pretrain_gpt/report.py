"""Writes the verdicts as JSON and Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rounding import ALLOWANCES

from benchmarks.markdown import table, table_row
from benchmarks.pretrain_gpt.cases import NUM_STEPS, cases
from benchmarks.pretrain_gpt.outcomes import Verdict
from benchmarks.results_file import add_checkout, checkouts

NAME = "pretrain_gpt"

_HEAD = """# Megatron's pretrain_gpt.py, unedited

Made by `scripts/check_upstream.sh CHECKOUT --publish`; do not edit. A tiny model on CPU ranks over gloo trains {steps}
steps from one set of weights, stock and balanced by FLOPs. Differences are the largest of any step, relative to the
reference; a run is equal within {loss:.1e} (rounding.py). CPU seconds are those of a step of all ranks, stock →
balanced; the machine did other work.
"""

_COLUMNS = "layout | data | loss | gradient norm | CPU s | verdict | reference"

Row = Mapping[str, Any]


def row_of(verdict: Verdict) -> Row:
    """A verdict as it is kept."""
    return {
        "run": verdict.case.name,
        "good": verdict.good,
        "verdict": verdict.says,
        "reference": verdict.reference,
        "loss": verdict.loss,
        "grad_norm": verdict.grad_norm,
        "cpu_seconds": verdict.cpu_seconds,
    }


def line(row: Row) -> str:
    """A line of the table."""
    return table_row(_cells(row))


def _cells(row: Row) -> list[str]:
    layout, data, _, *launched = row["run"].split(" / ")
    seconds = "–" if row["cpu_seconds"] is None else "{:.2f} → {:.2f}".format(*row["cpu_seconds"])
    figures = ["–" if row[key] is None else f"{row[key]:.1e}" for key in ("loss", "grad_norm")]
    return [", ".join([layout, *launched]), f"`{data}`", *figures, seconds, row["verdict"], row["reference"] or "–"]


def table_of(rows: Sequence[Row]) -> str:
    """All of them, and how many are as they must be."""
    good = sum(row["good"] for row in rows)
    text = table(_COLUMNS, map(_cells, rows), align="lllllll")
    return f"{text}\n\n{good} of {len(rows)} as they must be.\n"


def publish(rows: Iterable[Row], *, checkout: str, folder: Path) -> None:
    """Write the results of this checkout beside those of others: a JSON file and a page made from it.

    Runs that are not among `rows` are kept as they were.
    """
    earlier = checkouts(NAME, out=folder).get(checkout, {"runs": []})["runs"]
    by_name = {row["run"]: row for row in (*earlier, *rows)}
    runs = [by_name[case.name] for case in cases() if case.name in by_name]
    add_checkout(NAME, {"steps": NUM_STEPS, "runs": runs}, checkout=checkout, report=_page, out=folder)


def _page(known: Mapping[str, Any]) -> str:
    tables = [f"\n## {name}\n\n{table_of(result['runs'])}" for name, result in known.items()]
    return _HEAD.format(steps=NUM_STEPS, loss=ALLOWANCES["fp32"].loss) + "".join(tables)
