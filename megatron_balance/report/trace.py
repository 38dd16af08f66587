"""Writes a run as a trace for chrome://tracing and ui.perfetto.dev: one track a rank, one slice a micro-batch.

The format is Google's "Trace Event Format": complete events (`ph: X`) with `ts` and `dur` in microseconds. A step is
shown with measured times if every rank's micro-batches were measured, else with predicted ones. Gaps are waiting.

Invariants: events are sorted by time; slices of a track do not overlap; steps follow one another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megatron_balance.report.figures import RunFigures

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
        shown = figures.policies["measured" if measured else "planned"]
        line = shown.timeline(index)
        times = {
            "planned_imbalance": float(figures.planned.imbalance[index]),
            "measured_imbalance": float(shown.imbalance[index]) if measured else None,
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
        for place in np.argsort(begins, axis=None, kind="stable").tolist():
            rank, slot = divmod(place, step.num_microbatches)
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
