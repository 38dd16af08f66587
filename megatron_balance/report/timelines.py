"""Encodes timelines: of selected steps as compact integers for the page, of all as a trace for Perfetto.

Of a long run the page shows the worst, median, first and last step, and others at even distances up to `MAX_STEPS`.
Times are integers (`RESOLUTION` steps of the longest timeline), so that a step of 64 ranks takes tens of kilobytes.

A trace for chrome://tracing and ui.perfetto.dev, in Google's "Trace Event Format", has one track a rank, one slice a
micro-batch: complete events (`ph: X`) with `ts` and `dur` in microseconds. A step has measured times if every rank's
micro-batches were measured, else predicted ones. Gaps are waiting. Events are sorted by time; slices of a track do not
overlap; steps follow one another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
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


_STEPS, _RANKS = 0, 1
"""Process ids: the track of steps, and the tracks of ranks."""


def write_trace(figures: RunFigures, *, out: Path) -> None:
    """Write the trace of a run, one event a line."""
    unit, info = figures.planned.scale.unit, figures.record.info
    about = {"policy": info.policy, "objective": info.objective}
    about["time"] = "seconds" if unit == "s" else f"{unit}; the mean step is drawn as one second"
    with out.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "otherData": ' + json.dumps(about) + ', "traceEvents": [')
        for index, event in enumerate(_events(figures)):
            file.write((",\n" if index else "\n") + json.dumps(event, separators=(",", ":")))
        file.write("\n]}\n")


def _events(figures: RunFigures) -> Iterator[dict[str, Any]]:
    dynamic, unit = figures.record.info.topology.dynamic_cp, figures.planned.scale.unit
    yield _name("process_name", pid=_STEPS, name="steps")
    yield _name("process_name", pid=_RANKS, name=f"data-{' and context-' if dynamic else ''}parallel ranks")
    for rank in range(len(figures.planned.steps[0].cp_size_grid)):
        yield _name("thread_name", pid=_RANKS, tid=rank, name=f"rank {rank}")
    microseconds = 1e6 if unit == "s" else 1e6 / (float(figures.planned.times.mean()) or 1e6)
    begin = 0.0
    for index, step in enumerate(figures.record.steps):
        measured, predicted = step.is_measured, figures.planned.timeline(index)
        policy = figures.policies["measured" if measured else "planned"]
        line = policy.timeline(index)
        times = {
            "planned_imbalance": float(figures.planned.imbalance[index]),
            "measured_imbalance": float(policy.imbalance[index]) if measured else None,
            "plan_ms": step.plan_seconds * 1e3,
            "exchange_ms": step.exchange_seconds * 1e3,
            "exposed_ms": step.exposed_seconds * 1e3,
        }
        shared = {"ph": "X", "cat": "measured" if measured else "predicted"}
        end = begin + line.total * microseconds
        yield shared | {"name": f"step {step.iteration}", "pid": _STEPS, "tid": 0, **_span(begin, end), "args": times}
        begins = begin + line.starts * microseconds
        ends = begins + line.durations * microseconds
        lengths = step.lengths.tolist()
        for microbatch in np.argsort(begins, axis=None, kind="stable").tolist():
            rank, slot = divmod(microbatch, step.num_microbatches)
            if not line.sizes[rank, slot]:
                continue
            samples = line.samples[rank][slot]
            about = {
                "samples": samples,
                "lengths": [lengths[sample] for sample in samples],
                **({"cp_size": int(line.sizes[rank, slot])} if dynamic else {}),
                "cost": int(step.costs[rank, slot]),
                f"predicted_{unit}": float(predicted.durations[rank, slot]),
                "measured_s": float(step.seconds[rank, slot]) if measured else None,
            }
            span = _span(float(begins[rank, slot]), float(ends[rank, slot]))
            yield shared | {"name": f"micro-batch {slot}", "pid": _RANKS, "tid": rank, **span, "args": about}
        begin = end


def _span(begin: float, end: float) -> dict[str, float]:
    """Both ends are rounded to nanoseconds in the same way, so that slices that touched still touch."""
    first, last = round(begin * 1e3), round(end * 1e3)
    return {"ts": first / 1e3, "dur": (last - first) / 1e3}


def _name(kind: str, *, pid: int, tid: int = 0, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}
