"""Encodes the timelines of selected steps as compact integers for the page.

Of a long run the page shows the worst, median, first and last step, and others at even distances up to `MAX_STEPS`.
Times are integers (`RESOLUTION` steps of the longest timeline), so that a step of 64 ranks takes tens of kilobytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.report.figures import RunFigures, Timeline

RESOLUTION = 50_000
"""Integer time at the end of a step's longest timeline."""

MAX_STEPS = 40
MAX_DRAWN = 50_000
"""Most samples and micro-batches of all steps drawn, so that the page stays below 10 MB."""

MAX_SLICES = 4096
"""Most micro-batches drawn in one timeline; beyond, only some ranks are drawn."""

MAX_RANKS = 64


def timeline_data(figures: RunFigures) -> tuple[str, str]:
    """The timelines of selected steps as JSON, and the selection of steps and ranks in words."""
    labels, num_steps = _labels(figures), len(figures.record.steps)
    steps = [_step(index, label=labels[index], figures=figures) for index in sorted(labels)]
    num_ranks, num_drawn = len(figures.planned.steps[0].cp_size_grid), min(len(step["ranks"]) for step in steps)
    note = ""
    if len(steps) < num_steps:
        note = f"{len(steps)} of {num_steps:,} steps: the worst, the median, the last, and others evenly. "
    if num_drawn < num_ranks:
        note += (
            f"At least {num_drawn} of {num_ranks:,} ranks are drawn: the busiest of each timeline, and others evenly. "
        )
    first = sorted(labels).index(next(iter(labels)))
    content = {"unit": figures.planned.scale.unit, "first": first, "steps": steps}
    return json.dumps(content, separators=(",", ":")), note


def _labels(figures: RunFigures) -> dict[int, str]:
    """Labels of the steps drawn, by index; the page opens with the first, the median."""
    latest = list(figures.policies)[-1]
    measured, planned = figures.policies[latest].imbalance, figures.planned.imbalance
    order = np.argsort(np.where(np.isnan(measured), planned, measured), kind="stable").tolist()
    last, step = len(order) - 1, figures.planned.steps[order[-1]]
    labels = {order[last // 2]: f"median {latest} imbalance"}
    # A step with several labels keeps the first: the worst step is labelled so even if it is the last.
    for index, label in ((order[-1], f"worst {latest} imbalance"), (last, "last"), (0, "first")):
        labels.setdefault(index, label)
    num_more = max(min(MAX_STEPS, MAX_DRAWN // (step.lengths.size + step.cp_size_grid.size)) - len(labels), 0)
    for index in np.linspace(0, last, num_more + 1).astype(int).tolist():
        labels.setdefault(index, "")
    return labels


def _step(index: int, *, label: str, figures: RunFigures) -> dict[str, Any]:
    step = figures.record.steps[index]
    policies = {name: policy for name, policy in figures.policies.items() if step.is_measured or not policy.measured}
    lines = {name: policy.timeline(index) for name, policy in policies.items()}
    ranks = _drawn_ranks(lines)
    tick = max(line.total for line in lines.values()) / RESOLUTION or 1.0
    panels: list[dict[str, Any]] = []
    for name, line in lines.items():
        drawn = [ids for rank in ranks.tolist() for ids in line.samples[rank]]
        panels.append(
            {
                "key": name,
                "slots": line.starts.shape[1],
                "total": round(line.total / tick),
                "idle": round(1 - float(line.durations.sum()) / ((line.total or 1.0) * len(line.durations)), 4),
                "imbalance": round(float(policies[name].imbalance[index]), 4),
                "starts": np.rint(line.starts[ranks] / tick).astype(np.int64).ravel().tolist(),
                "ends": np.rint((line.starts + line.durations)[ranks] / tick).astype(np.int64).ravel().tolist(),
                "counts": [len(ids) for ids in drawn],
                "ids": [sample for ids in drawn for sample in ids],
                "sizes": line.sizes[ranks].ravel().tolist() if figures.record.info.topology.dynamic_cp else [],
            }
        )
    return {
        "iteration": step.iteration,
        "label": label,
        "tick": float(f"{tick:.6g}"),
        "ranks": ranks.tolist(),
        "lengths": step.lengths.tolist(),
        "panels": panels,
    }


def _drawn_ranks(lines: Mapping[str, Timeline]) -> NDArray[np.int64]:
    """Ranks to draw: all, or the busiest of each timeline and others at even distances."""
    durations = [line.durations for line in lines.values()]
    num_ranks, num_slots = len(durations[0]), max(grid.shape[1] for grid in durations)
    num_drawn = min(num_ranks, MAX_RANKS, max(MAX_SLICES // num_slots, 8))
    if num_drawn == num_ranks:
        return np.arange(num_ranks)
    busiest = [int(grid.sum(axis=1).argmax()) for grid in durations]
    evenly = np.linspace(0, num_ranks - 1, max(num_drawn - len(busiest), 1)).astype(int).tolist()
    return np.unique(busiest + evenly)
