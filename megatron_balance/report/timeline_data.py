"""Encodes the timelines of selected steps as compact integers for the page.

Of a long run the page shows the worst, median, first and last step, and others at even distances up to `MAX_BYTES`.

Invariant: times are integers (`RESOLUTION` steps of the longest timeline), so that a step of 64 ranks takes tens of
kilobytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.record.judging import rows_of
from megatron_balance.record.step import StepRecord
from megatron_balance.report.run_figures import RunFigures
from megatron_balance.report.time_scale import is_measured
from megatron_balance.report.timeline import Timeline, step_timeline

RESOLUTION = 50_000
"""Integer time at the end of a step's longest timeline."""

MAX_STEPS = 40
MAX_BYTES = 3_500_000
MAX_SLICES = 4096
"""Most micro-batches drawn in one timeline; beyond, only some ranks are drawn."""

MAX_RANKS = 64


@dataclass(frozen=True)
class TimelineData:
    """Timelines of the page.

    Attributes:
        steps: one mapping a step, in order of iterations.
        first_shown: index of the step that the page opens with.
        text: the steps as JSON.
        note: the selection of steps and ranks as text.
    """

    steps: tuple[dict[str, Any], ...]
    first_shown: int
    text: str
    note: str


def timeline_data(figures: RunFigures) -> TimelineData:
    """Timelines of selected steps, within `MAX_BYTES`."""
    chosen: dict[int, tuple[str, str]] = {}
    size = 0
    for index, label in _by_interest(figures):
        text = json.dumps(_step(index, label=label, figures=figures), separators=(",", ":"))
        if chosen and size + len(text) > MAX_BYTES:
            break
        size += len(text)
        chosen[index] = (label, text)
    order = sorted(chosen)
    shown = order.index(next(iter(chosen)))
    text = '{"unit":' + json.dumps(figures.scale.unit) + f',"first":{shown},"steps":['
    text += ",".join(chosen[index][1] for index in order) + "]}"
    return TimelineData(
        steps=tuple(json.loads(chosen[index][1]) for index in order),
        first_shown=shown,
        text=text,
        note=_note(figures, order),
    )


def _note(figures: RunFigures, order: list[int]) -> str:
    num_steps, dp_size = len(figures.record.steps), _num_rows(figures)
    note = (
        ""
        if len(order) == num_steps
        else f"{len(order)} of {num_steps:,} steps: the worst, the median, the last, and others evenly. "
    )
    drawn = min(len(_drawn_ranks(figures, index)) for index in order)
    if drawn < dp_size:
        note += f"At least {drawn} of {dp_size:,} ranks are drawn: the busiest of each timeline, and others evenly. "
    return note


def _num_rows(figures: RunFigures) -> int:
    """Ranks of a timeline; leaves where context-parallel sizes differ."""
    topology = figures.info.topology
    return topology.num_leaves if topology.dynamic_cp else topology.dp_size


def _by_interest(figures: RunFigures) -> Iterator[tuple[int, str]]:
    """Indices and labels of steps, each once, by falling interest; the page opens with the first."""
    shown = figures.shown_imbalance
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
    yield from labels.items()


def _timelines(figures: RunFigures, index: int) -> list[tuple[str, str, StepRecord, Timeline]]:
    """Key, title, samples and times of each timeline of a step, stock first."""
    scale, info = figures.scale, figures.info
    policies = [("stock", "Before: stock sampler, predicted", figures.stock)]
    if figures.beforehand is not None:
        policies.append(("beforehand", "Planned beforehand, predicted", figures.beforehand))
    policies.append(("planned", "After: the plan, predicted", figures.planned))
    lines = [
        (key, title, policy.steps[index], step_timeline(scale.times(policy.steps[index]), info=info))
        for key, title, policy in policies
        if index < len(policy.steps)
    ]
    step = figures.record.steps[index]
    if is_measured(step):
        lines.append(("measured", "After: measured", step, step_timeline(step.seconds, info=info, with_bubble=False)))
    return lines


def _drawn_ranks(figures: RunFigures, index: int) -> NDArray[np.int64]:
    """Ranks to draw: all, or the busiest of each timeline and others at even distances."""
    lines = _timelines(figures, index)
    dp_size = _num_rows(figures)
    num_slots = max(step.num_microbatches for _, _, step, _ in lines)
    num_drawn = min(dp_size, MAX_RANKS, max(MAX_SLICES // num_slots, 8))
    if num_drawn == dp_size:
        return np.arange(dp_size)
    busiest = [int(line.durations.sum(axis=1).argmax()) for _, _, _, line in lines]
    evenly = np.linspace(0, dp_size - 1, max(num_drawn - len(busiest), 1)).astype(int).tolist()
    return np.unique(busiest + evenly)


def _step(index: int, *, label: str, figures: RunFigures) -> dict[str, Any]:
    step = figures.record.steps[index]
    ranks = _drawn_ranks(figures, index)
    lines = _timelines(figures, index)
    tick = max(line.total for _, _, _, line in lines) / RESOLUTION or 1.0
    batches: list[list[int]] = []
    panels: list[dict[str, Any]] = []
    for key, title, placed, line in lines:
        lengths = placed.lengths.tolist()
        if lengths not in batches:
            batches.append(lengths)
        rows = rows_of(placed, info=figures.info)
        drawn = [ids for rank in ranks.tolist() for ids in rows[rank].samples]
        panels.append(
            {
                "key": key,
                "title": title,
                "slots": placed.num_microbatches,
                "total": round(line.total / tick),
                "idle": round(line.idle_fraction, 4),
                "imbalance": round(_imbalance(figures, index, key=key), 4),
                "starts": _ticks(line.starts[ranks], tick=tick),
                "ends": _ticks((line.starts + line.durations)[ranks], tick=tick),
                "batch": batches.index(lengths),
                "counts": [len(ids) for ids in drawn],
                "ids": [sample for ids in drawn for sample in ids],
                "sizes": [size for rank in ranks.tolist() for size in rows[rank].cp_sizes],
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


def _imbalance(figures: RunFigures, index: int, *, key: str) -> float:
    if key == "measured":
        return float(figures.measured_imbalance[index])
    policy = {"stock": figures.stock, "planned": figures.planned, "beforehand": figures.beforehand}[key]
    assert policy is not None
    return float(policy.imbalance[index])


def _ticks(times: NDArray[np.float64], *, tick: float) -> list[int]:
    return np.rint(times / tick).astype(np.int64).ravel().tolist()
