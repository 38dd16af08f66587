"""Encodes the timelines of selected steps as compact integers for the page.

Of a long run the page shows steps at even distances by their imbalance, the most even and the worst included. Times are
integers (`RESOLUTION` steps of the longest timeline), so that a step of 64 ranks takes tens of kilobytes.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from megatron_balance.planner import Forest
from megatron_balance.record import StepRecord
from megatron_balance.report.figures import RunFigures

RESOLUTION = 50_000
"""Integer time at the end of a step's longest timeline."""

MAX_STEPS, MAX_RANKS = 40, 64
MAX_DRAWN = 50_000
"""Most samples and micro-batches of all steps drawn, so that the page stays below 1.5 MB."""

MAX_ROWS = 256
"""Most samples drawn of a micro-batch that shares tokens."""

MAX_SLICES = 4096
"""Most micro-batches drawn in one timeline; beyond, only some ranks are drawn."""


def timeline_data(figures: RunFigures) -> tuple[str, str]:
    """The timelines of selected steps as JSON, and the selection of steps and ranks in words."""
    *_, latest = figures.policies
    measured, planned = figures.policies[latest].imbalance, figures.planned.imbalance
    order = np.argsort(np.where(np.isnan(measured), planned, measured), kind="stable")
    largest = figures.planned.steps[order[-1]]
    num_steps = min(MAX_STEPS, MAX_DRAWN // (largest.lengths.size + largest.cp_size_grid.size))
    chosen = order[np.unique(np.linspace(0, order.size - 1, max(num_steps, 3)).astype(int))].tolist()
    median = chosen[(len(chosen) - 1) // 2]
    labels = {chosen[-1]: f"worst {latest} imbalance", median: f"median {latest} imbalance"}
    steps = [_step(index, label=labels.get(index, ""), figures=figures) for index in sorted(chosen)]
    num_ranks, num_drawn = len(largest.cp_size_grid), min(len(step["ranks"]) for step in steps)
    note = f"{len(steps)} of {order.size:,} steps, from the most even to the worst. " * (len(steps) < order.size)
    if num_drawn < num_ranks:
        note += f"At least {num_drawn} of {num_ranks:,} ranks are drawn: the busiest, and others by their time. "
    content = {"unit": figures.planned.scale.unit, "first": sorted(chosen).index(median), "steps": steps}
    return json.dumps(content, separators=(",", ":")), note


def _step(index: int, *, label: str, figures: RunFigures) -> dict[str, Any]:
    step = figures.record.steps[index]
    policies = {name: policy for name, policy in figures.policies.items() if step.is_measured or not policy.measured}
    lines = {name: policy.timeline(index) for name, policy in policies.items()}
    tick = max(line.total for line in lines.values()) / RESOLUTION or 1.0
    by_time = np.argsort([line.durations.sum(axis=1) for line in lines.values()][-1], kind="stable")
    num_slots = max(line.starts.shape[1] for line in lines.values())
    num_drawn = min(by_time.size, MAX_RANKS, max(MAX_SLICES // num_slots, 8))
    ranks = np.sort(by_time[np.linspace(0, by_time.size - 1, num_drawn).astype(int)])
    panels: list[dict[str, Any]] = []
    for name, line in lines.items():
        panels.append(
            {
                "key": name,
                "total": round(line.total / tick),
                "idle": round(1 - float(line.durations.sum()) / ((line.total or 1.0) * len(line.durations)), 4),
                "imbalance": round(float(policies[name].imbalance[index]), 4),
                "starts": np.rint(line.starts[ranks] / tick).astype(np.int64).tolist(),
                "ends": np.rint((line.starts + line.durations)[ranks] / tick).astype(np.int64).tolist(),
                "samples": [line.samples[rank] for rank in ranks.tolist()],
                "sizes": line.sizes[ranks].tolist() if figures.record.info.topology.dynamic_cp else [],
            }
        )
    return {
        "iteration": step.iteration,
        "label": label,
        "tick": float(f"{tick:.6g}"),
        "ranks": ranks.tolist(),
        "lengths": step.lengths.tolist(),
        "panels": panels,
        "forest": None if step.forest is None else _forest(step, step.forest),
    }


def _forest(step: StepRecord, forest: Forest) -> dict[str, Any]:
    """The micro-batch that saves most tokens: `nodes` are their start, tokens, first row and rows, a row a sample."""
    size = step.cp_size_grid.size
    given, computed = (
        np.bincount(step.microbatch_of, tokens, size).astype(np.int64)
        for tokens in (step.padded_lengths, step.computed_lengths)
    )
    place = int((given - computed).argmax())
    rank, slot = divmod(place, step.num_microbatches)
    paths = forest.paths[:, forest.order[step.microbatch_of[forest.order] == place]][:, :MAX_ROWS]
    nodes, first, rows = np.unique(paths[paths >= 0], return_index=True, return_counts=True)
    row = np.broadcast_to(np.arange(paths.shape[1]), paths.shape)[paths >= 0][first]
    tokens = forest.node_tokens[nodes]
    table = np.stack([forest.ends[nodes] - tokens, tokens, row, rows], axis=1)
    numbers = {"rank": rank, "slot": slot, "given": int(given[place]), "computed": int(computed[place])}
    return {**numbers, "nodes": table[tokens > 0].tolist()}
