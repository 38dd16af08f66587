"""Counts the meetings of real ranks and compares them with the formulas of `traffic.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.scale.traffic import Traffic

TOLERANCE = 0.01
"""Of the bytes that TCP counts: gloo announces a message once more, or once less, where both sides come at once."""


def problems_of(counted: Mapping[str, Any]) -> Iterator[str]:
    """Counts of one rank that differ from the formulas."""
    expected = counted["expected"]
    for name in ("calls", "in_training", "traffic", "sockets"):
        if counted[name] != expected[name]:
            yield f"{name} {counted[name]}, and the formula says {expected[name]}"
    of = Traffic(**counted["traffic"])
    by_formula = of.sent_nbytes + of.frames_sent_nbytes
    if abs(counted["tcp_sent_nbytes"] - by_formula) > TOLERANCE * by_formula:
        yield f"TCP sent {counted['tcp_sent_nbytes']} bytes, and the formula says {by_formula}"
