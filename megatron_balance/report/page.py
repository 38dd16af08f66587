"""Writes the report as one HTML file that opens offline and contains all data.

The text is in assets/page.html, the drawing in page.js; this file computes what they show.

Invariants: the page loads nothing from elsewhere, and its Content-Security-Policy forbids it; text from the run
is escaped; what charts show is in its captions and tables as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import numpy as np

from megatron_balance.errors import BalanceError
from megatron_balance.record.fit import NOTABLE_ERROR
from megatron_balance.report.charts import TITLES, charts_of
from megatron_balance.report.figures import PolicyFigures, RunFigures, amount
from megatron_balance.report.timelines import timeline_data

MUCH_WAITING = 0.01
"""Part of a step that no plan removes, above which the page says what does."""

NONE = "–"
"""A cell without a value."""


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
    charts = charts_of(figures)
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
        rows=_rows(figures, peak=peak),
        batch=" to ".join(f"{size:,}" for size in sorted({min(batches), max(batches)})),
        verdict=_verdict(figures),
        next_step=_next_step(figures),
        nanmean=np.nanmean,
        charts=charts,
        selection=selection,
        timelines=timelines,
        drawn=json.dumps([chart._asdict() for chart in charts], separators=(",", ":")),
        style=_asset("style.css"),
        script=_asset("page.js"),
    )
    out.write_text(page, encoding="utf-8")


def _verdict(figures: RunFigures) -> str:
    """One sentence: how even ranks are, and how much a better plan could gain."""
    longer = {name: np.nanmean(policy.imbalance) - 1 for name, policy in figures.policies.items()}
    measured = f" ({longer['measured']:.1%} measured)" if "measured" in longer else ""
    return (
        f"As planned the slowest rank works {longer['planned']:.1%} longer than the mean rank{measured}, in stock "
        f"{longer['stock']:.1%}; another plan at these context-parallel sizes would gain "
        f"{figures.planned.mean('over_bound') - 1:.1%} at most."
    )


def _next_step(figures: RunFigures) -> str:
    """What a reader does with the page."""
    unavoidable = max(step.unavoidable_waiting for step in figures.planned.metrics)
    if unavoidable > MUCH_WAITING:
        return (
            f"In the worst step GPUs wait {unavoidable:.0%} of the time in any plan, since one sample is too long for "
            "a rank's even share: compare --balance-dynamic-cp, a larger global batch, and a shorter --seq-length."
        )
    if "measured" not in figures.policies:
        return (
            "Check the flags by megatron-balance doctor -- FLAGS, train 20 steps with them and --balance-record "
            "record, then: megatron-balance report record."
        )
    if figures.predictions.size and figures.median_error > NOTABLE_ERROR:
        return (
            f"The cost model is off by {figures.median_error:.1%} on this machine: megatron-balance fit RECORD, then "
            "train with --balance-cost seconds.json."
        )
    return (
        "Plans and seconds agree. megatron-balance compare RECORD says what other caps and context-parallel sizes "
        "would bring on the same GPUs."
    )


def _rows(figures: RunFigures, *, peak: float | None) -> list[list[str]]:
    """The table: the name of a figure, its value under each policy, and measured."""
    rows: list[list[str]] = []

    def add(name: str, text: Callable[[PolicyFigures], str], *, is_measured: bool = False) -> None:
        """A row; a figure that is not `is_measured` is of predictions alone."""
        policies = figures.policies.values()
        rows.append([name, *(NONE if policy.measured and not is_measured else text(policy) for policy in policies)])

    add("imbalance (slowest / mean), mean", lambda policy: f"{np.nanmean(policy.imbalance):.3f}", is_measured=True)
    add("imbalance, worst step", lambda policy: f"{np.nanmax(policy.imbalance):.3f}", is_measured=True)
    add("step, mean", lambda policy: amount(np.nanmean(policy.times), unit=policy.scale.unit), is_measured=True)
    if peak is not None:
        add(
            f"MFU at {peak:g} TFLOP/s",
            lambda policy: f"{figures.mfu(policy, peak=peak):.1%}".replace("nan%", NONE),
            is_measured=True,
        )
    add("waiting that no plan at these sizes removes", lambda policy: f"{policy.mean('unavoidable_waiting'):.1%}")
    add("above the lower bound, mean", lambda policy: f"{policy.mean('over_bound') - 1:+.2%}")
    add("micro-batches of a rank, mean", lambda policy: f"{policy.mean('num_microbatches'):.1f}")
    add("padding, mean", lambda policy: f"{policy.mean('padding_fraction'):.2%}")
    if figures.planned.sharing is not None:
        add("tokens computed, mean", lambda policy: f"{policy.mean('computed_tokens'):,.0f}")
    if figures.record.info.limits.max_tokens_per_gpu is not None:
        add("room under the token cap, least", lambda policy: f"{policy.least_headroom:.1%}")
    add("moved tokens, of all, mean", _moved_part)
    for name, work in (("plan", "planning"), ("exchange", "moving samples"), ("exposed", "waiting for both")):
        seconds = np.array([getattr(step, f"{name}_seconds") for step in figures.record.steps])
        if seconds.any():
            rows.append([f"{work}, mean", *[NONE] * (len(rows[0]) - 2), amount(seconds.mean(), unit="s")])
    if np.isfinite(figures.slowdowns).all():
        rank = int(figures.slowdowns.argmax())
        slowdown = f"rank {rank}: {figures.slowdowns[rank]:.2f}×"
        rows.append(["slowest rank for its work, of the median rank's time", *[NONE] * (len(rows[0]) - 2), slowdown])
    return rows


def _moved_part(policy: PolicyFigures) -> str:
    """Part of the tokens that moved; unknown where several ranks share a sample, as one loads it and all run it."""
    moved = [step.moved_tokens for step in policy.metrics if step.moved_tokens is not None]
    tokens = sum(int(step.lengths.sum()) for step in policy.steps)
    return f"{sum(moved) / max(tokens, 1):.0%}" if len(moved) == len(policy.metrics) else NONE


def _asset(name: str) -> str:
    return (resources.files("megatron_balance.report") / "assets" / name).read_text(encoding="utf-8")
