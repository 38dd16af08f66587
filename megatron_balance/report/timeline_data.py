"""Encodes the timelines of selected steps as compact integers for the page.

Of a long run the page shows the worst, median, first and last step, and others at even distances up to `MAX_BYTES`.

Invariant: times are integers (`RESOLUTION` steps of the longest timeline), so that a step of 64 ranks takes tens of
kilobytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.record import StepRecord
from megatron_balance.record.judging import is_measured, rows_of
from megatron_balance.report.charts import COLOURS
from megatron_balance.report.figures import RunFigures, Timeline, step_timeline

RESOLUTION = 50_000
"""Integer time at the end of a step's longest timeline."""

MAX_STEPS = 40
MAX_BYTES = 3_500_000
MAX_SLICES = 4096
"""Most micro-batches drawn in one timeline; beyond, only some ranks are drawn."""

MAX_RANKS = 64

_TITLES = {
    "stock": "Before: stock sampler, predicted",
    "planned": "After: the plan, predicted",
    "measured": "After: measured",
}


def timeline_data(figures: RunFigures) -> tuple[str, str]:
    """The timelines of selected steps as JSON within `MAX_BYTES`, and the selection of steps and ranks in words."""
    chosen: dict[int, str] = {}
    size, drawn = 0, figures.num_rows
    for index, label in _by_interest(figures).items():
        step = _step(index, label=label, figures=figures)
        text = json.dumps(step, separators=(",", ":"))
        if chosen and size + len(text) > MAX_BYTES:
            break
        size, drawn = size + len(text), min(drawn, len(step["ranks"]))
        chosen[index] = text
    order = sorted(chosen)
    note, num_steps = "", len(figures.record.steps)
    if len(order) < num_steps:
        note = f"{len(order)} of {num_steps:,} steps: the worst, the median, the last, and others evenly. "
    if drawn < figures.num_rows:
        note += f"At least {drawn} of {figures.num_rows:,} ranks are drawn: the busiest of each timeline, "
        note += "and others evenly. "
    first = order.index(next(iter(chosen)))
    steps = ",".join(chosen[index] for index in order)
    return f'{{"unit":{json.dumps(figures.scale.unit)},"first":{first},"steps":[{steps}]}}', note


def _by_interest(figures: RunFigures) -> dict[int, str]:
    """Labels of steps by index, by falling interest; the page opens with the first."""
    planned = figures.policies["planned"].imbalance
    shown = np.where(np.isnan(figures.measured_imbalance), planned, figures.measured_imbalance)
    order = np.argsort(shown, kind="stable")
    word = "measured" if figures.is_measured else "planned"
    # A step with several labels keeps the first: the worst step is labelled so even if it is the last.
    labels: dict[int, str] = {}
    for index, label in (
        (int(order[(order.size - 1) // 2]), f"median {word} imbalance"),
        (int(order[-1]), f"worst {word} imbalance"),
        (order.size - 1, "last"),
        (0, "first"),
    ):
        labels.setdefault(index, label)
    evenly = np.linspace(0, order.size - 1, MAX_STEPS - len(labels) + 1).astype(int).tolist()
    for index in evenly:
        labels.setdefault(index, "")
    return labels


def _step(index: int, *, label: str, figures: RunFigures) -> dict[str, Any]:
    step, info = figures.record.steps[index], figures.info
    placed = {name: one.steps[index] for name, one in figures.policies.items()}
    lines = {name: step_timeline(figures.scale.times(one), info=info) for name, one in placed.items()}
    imbalance = {name: float(figures.policies[name].imbalance[index]) for name in placed}
    if is_measured(step):
        placed["measured"] = step
        lines["measured"] = step_timeline(step.seconds, info=info, with_bubble=False)
        imbalance["measured"] = float(figures.measured_imbalance[index])
    ranks = _drawn_ranks(placed, lines=lines, num_rows=figures.num_rows)
    tick = max(line.total for line in lines.values()) / RESOLUTION or 1.0
    batches: list[list[int]] = []
    panels: list[dict[str, Any]] = []
    for name, line in lines.items():
        lengths = placed[name].lengths.tolist()
        if lengths not in batches:
            batches.append(lengths)
        rows, sizes = rows_of(placed[name], info=info)
        drawn = [ids for rank in ranks.tolist() for ids in rows[rank]]
        panels.append(
            {
                "key": name,
                "title": _TITLES[name],
                "colour": COLOURS[name],
                "slots": placed[name].num_microbatches,
                "total": round(line.total / tick),
                "idle": round(line.idle_fraction, 4),
                "imbalance": round(imbalance[name], 4),
                "starts": _ticks(line.starts[ranks], tick=tick),
                "ends": _ticks((line.starts + line.durations)[ranks], tick=tick),
                "batch": batches.index(lengths),
                "counts": [len(ids) for ids in drawn],
                "ids": [sample for ids in drawn for sample in ids],
                "sizes": sizes[ranks].ravel().tolist() if info.topology.dynamic_cp else [],
            }
        )
    return {
        "iteration": step.iteration,
        "label": label,
        "tick": float(f"{tick:.6g}"),
        "ranks": ranks.tolist(),
        "batches": batches,
        "panels": panels,
    }


def _drawn_ranks(
    placed: Mapping[str, StepRecord], *, lines: Mapping[str, Timeline], num_rows: int
) -> NDArray[np.int64]:
    """Ranks to draw: all, or the busiest of each timeline and others at even distances."""
    num_slots = max(step.num_microbatches for step in placed.values())
    num_drawn = min(num_rows, MAX_RANKS, max(MAX_SLICES // num_slots, 8))
    if num_drawn == num_rows:
        return np.arange(num_rows)
    busiest = [int(line.durations.sum(axis=1).argmax()) for line in lines.values()]
    evenly = np.linspace(0, num_rows - 1, max(num_drawn - len(busiest), 1)).astype(int).tolist()
    return np.unique(busiest + evenly)


def _ticks(times: NDArray[np.float64], *, tick: float) -> list[int]:
    return np.rint(times / tick).astype(np.int64).ravel().tolist()
