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

from megatron_balance.errors import BalanceError
from megatron_balance.record.judging import is_measured, rows_of
from megatron_balance.report.figures import RunFigures, step_timeline

_STEPS, _RANKS = 0, 1
"""Process ids: the track of steps, and the tracks of ranks."""


def write_trace(figures: RunFigures, *, out: Path) -> Path:
    """Write the trace of a run.

    Args:
        figures: the run.
        out: file to write, one event a line.

    Returns:
        The file.

    Raises:
        BalanceError: the file cannot be written.
    """
    try:
        with out.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "otherData": ' + json.dumps(_about(figures)) + ', "traceEvents": [')
            for index, event in enumerate(_events(figures)):
                file.write((",\n" if index else "\n") + json.dumps(event, separators=(",", ":")))
            file.write("\n]}\n")
    except OSError as error:
        raise BalanceError(f"--trace is {str(out)!r}: it cannot be written ({error.strerror}).") from error
    return out


def _about(figures: RunFigures) -> dict[str, str]:
    unit = figures.scale.unit
    time = "seconds" if unit == "s" else f"{unit}; the mean step is drawn as one second"
    return {"policy": figures.info.policy, "objective": figures.info.objective, "time": time}


def _microseconds(figures: RunFigures) -> float:
    """Microseconds of one unit of the time scale."""
    if figures.scale.unit == "s":
        return 1e6
    mean = float(figures.policies["planned"].times.mean())
    return 1e6 / mean if mean else 1.0


def _events(figures: RunFigures) -> Iterator[dict[str, Any]]:
    yield from _names(figures)
    per_unit, begin = _microseconds(figures), 0.0
    for index, step in enumerate(figures.record.steps):
        measured = is_measured(step)
        times = figures.scale.times(step)
        timeline = step_timeline(step.seconds if measured else times, info=figures.info, with_bubble=not measured)
        begins = begin + timeline.starts * per_unit
        ends = begin + (timeline.starts + timeline.durations) * per_unit
        end = begin + timeline.total * per_unit
        yield {
            "ph": "X",
            "name": f"step {step.iteration}",
            "cat": "measured" if measured else "predicted",
            "pid": _STEPS,
            "tid": 0,
            **_span(begin, end),
            "args": {
                "planned_imbalance": float(figures.policies["planned"].imbalance[index]),
                "measured_imbalance": float(figures.measured_imbalance[index]) if measured else None,
                "plan_ms": step.plan_seconds * 1e3,
                "exchange_ms": step.exchange_seconds * 1e3,
                "exposed_ms": step.exposed_seconds * 1e3,
            },
        }
        (rows, sizes), lengths = rows_of(step, info=figures.info), step.lengths.tolist()
        for place in np.argsort(begins, axis=None, kind="stable").tolist():
            rank, slot = divmod(place, step.num_microbatches)
            if not sizes[rank, slot]:
                continue
            samples = rows[rank][slot]
            yield {
                "ph": "X",
                "name": f"micro-batch {slot}",
                "cat": "measured" if measured else "predicted",
                "pid": _RANKS,
                "tid": rank,
                **_span(float(begins[rank, slot]), float(ends[rank, slot])),
                "args": {
                    "samples": samples,
                    "lengths": [lengths[sample] for sample in samples],
                    **({"cp_size": int(sizes[rank, slot])} if figures.info.topology.dynamic_cp else {}),
                    "cost": int(step.cost_grid[rank, slot]) << step.cost_shift,
                    f"predicted_{figures.scale.unit}": float(times[rank, slot]),
                    "measured_s": float(step.seconds[rank, slot]) if measured else None,
                },
            }
        begin = end


def _span(begin: float, end: float) -> dict[str, float]:
    """Both ends are rounded to nanoseconds in the same way, so that slices that touched still touch."""
    first, last = round(begin * 1e3), round(end * 1e3)
    return {"ts": first / 1e3, "dur": (last - first) / 1e3}


def _names(figures: RunFigures) -> Iterator[dict[str, Any]]:
    def named(kind: str, *, pid: int, tid: int, name: str) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}

    yield named("process_name", pid=_STEPS, tid=0, name="steps")
    topology = figures.info.topology
    kind = "data- and context-parallel ranks" if topology.dynamic_cp else "data-parallel ranks"
    yield named("process_name", pid=_RANKS, tid=0, name=kind)
    for rank in range(figures.num_rows):
        yield named("thread_name", pid=_RANKS, tid=rank, name=f"rank {rank}")
