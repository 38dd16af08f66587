"""Writes the record of a run while it runs, a line a step (`run_record.py` describes the lines).

Invariants: a line is handed to the system whole before the next step, so that a killed process loses at most its last
one; no thread, no communication.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.record.run_record import PLAN, RunInfo
from megatron_balance.record.step import StepRecord, line_of

_MAX_LINE = 2**26
"""Bytes at the end of a file in which its last line begins."""


def text_of(line: Mapping[str, Any]) -> bytes:
    """A line of a record."""
    return json.dumps(line, allow_nan=False).encode() + b"\n"


class _Lines:
    """Appends lines to a file.

    Args:
        path: the file; its folder is made.
        resume: go on after the last whole line that is there; else start anew.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b" if resume else "wb", buffering=0)
        if resume:
            # A killed run may have left the beginning of a line.
            start = self._file.seek(max(self._file.seek(0, os.SEEK_END) - _MAX_LINE, 0))
            self._file.truncate(start + self._file.readall().rfind(b"\n") + 1)

    def append(self, line: Mapping[str, Any]) -> None:
        """Write one line."""
        text = memoryview(text_of(line))
        while text:
            text = text[self._file.write(text) :]


class PlanWriter:
    """Writes the plans of a run.

    Args:
        folder: of the record.
        info: written at once.
        resume: go on after the steps that are there; else they are an earlier run's and are removed.

    Raises:
        OSError: the folder cannot be written to.
    """

    def __init__(self, folder: Path, *, info: RunInfo, resume: bool = False) -> None:
        if resume:
            _set_aside(folder, info=info)
        self._lines = _Lines(folder / PLAN, resume=resume)
        self._cost_model = info.cost_model
        self._lines.append(info.line())

    def add(self, step: StepRecord) -> None:
        """Write one step."""
        self._lines.append(line_of(step, cost_model=self._cost_model))


def _set_aside(folder: Path, *, info: RunInfo) -> None:
    """Move the record of the same run on other ranks, before it was resumed, to a record of its own: `earlier_N`.

    A record is of one topology. Other ranks open their files with their first step, after this.
    """
    path = folder / PLAN
    if not path.exists():
        return
    with path.open("rb") as lines:
        try:
            if RunInfo.of_line(json.loads(lines.readline())).topology == info.topology:
                return
        except (LookupError, TypeError, ValueError):
            pass  # of another version, or cut off
    aside = folder / f"earlier_{len(list(folder.glob('earlier_*')))}"
    aside.mkdir()
    for moved in [path, *folder.glob("seconds_rank*.jsonl")]:
        moved.rename(aside / moved.name)


class SecondsWriter:
    """Writes the measured seconds of one data-parallel rank's micro-batches, or of one leaf's.

    Args:
        folder: of the record.
        dp_rank: of this rank; its leaf with dynamic context-parallel sizes.
        resume: as for PlanWriter, of this rank's file.
    """

    def __init__(self, folder: Path, *, dp_rank: int, resume: bool = False) -> None:
        self._path = folder / f"seconds_rank{dp_rank:05d}.jsonl"
        self._rank = dp_rank
        self._resume = resume
        self._lines: _Lines | None = None
        folder.mkdir(parents=True, exist_ok=True)
        if not resume:
            self._path.unlink(missing_ok=True)

    def add(self, iteration: int, *, seconds: NDArray[np.float64]) -> None:
        """Write one step: `[num_microbatches]` seconds, to nine digits; NaN where a micro-batch was not measured."""
        if self._lines is None:  # the first rank may move earlier files away until the first step has run
            self._lines = _Lines(self._path, resume=self._resume)
        values = [None if math.isnan(value) else float(f"{value:.9g}") for value in seconds.tolist()]
        self._lines.append({"kind": "seconds", "iteration": iteration, "rank": self._rank, "seconds": values})
