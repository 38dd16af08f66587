"""Writes a record in a thread of its own, so that no step waits for a file system.

Invariants: `add` takes no time worth naming and raises nothing; lines are written in their order, each handed to the
system before the next one is made, so that a killed process loses its last lines alone; what cannot be written is
counted; neither a file system that hangs nor one that fails ends the process or keeps it from its end.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.record.run_record import PLAN, RunInfo, line_of
from megatron_balance.record.step import StepRecord

MAX_WAITING = 16
"""Lines that wait for the disk, of which the longest holds the plan of a step; later ones are dropped."""

CLOSE_SECONDS = 5.0
"""For what still waits at the end of training."""

_PIECE = 2048
"""Numbers of a line that are made text at once, in some 0.1 ms of the interpreter's lock."""

_MAX_LINE = 2**26
"""Bytes at the end of a file in which its last line begins."""


def text_of(line: Mapping[str, Any]) -> bytes:
    """A line of a record."""
    return b"".join(_pieces(line))


def _pieces(line: Mapping[str, Any]) -> Iterator[bytes]:
    """The text of a line in pieces: another thread need not wait for the whole."""
    before = "{"
    for name, value in line.items():
        yield f"{before}{json.dumps(name)}: ".encode()
        before = ", "
        if not isinstance(value, np.ndarray):
            yield json.dumps(value, allow_nan=False).encode()
            continue
        for start in range(0, value.size, _PIECE):
            numbers = json.dumps(value[start : start + _PIECE].tolist())[1:-1]
            yield f"{', ' if start else '['}{numbers}".encode()
        yield b"]" if value.size else b"[]"
    yield b"}\n"


class RecordWriter:
    """Writes one rank's part of a record: its seconds, and with `info` all plans; `resume` appends."""

    def __init__(self, folder: Path, *, rank: int, info: RunInfo | None = None, resume: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._rank = rank
        self._seconds = _open(folder / f"seconds_rank{rank:05d}.jsonl", resume=resume)
        self._plans = None if info is None else _open(folder / PLAN, resume=resume)
        if info is not None:
            self.add_info(info)

    def close(self) -> None:
        """Close the files."""
        self._seconds.close()
        if self._plans is not None:
            self._plans.close()

    def add_info(self, info: RunInfo) -> None:
        """Write what the steps that follow share."""
        self._add_plan(info.line())

    def add_step(self, step: StepRecord) -> None:
        """Write the plan of one step."""
        self._add_plan(line_of(step))

    def add_cap(self, measured_cap: int) -> None:
        """Write `RunRecord.measured_cap`."""
        self._add_plan({"kind": "memory", "measured_cap": measured_cap})

    def add_seconds(self, iteration: int, *, seconds: NDArray[np.float64]) -> None:
        """Write one step: `[num_microbatches]` seconds, to nine digits; NaN where a micro-batch was not measured."""
        values = [None if math.isnan(value) else float(f"{value:.9g}") for value in seconds.tolist()]
        _append(self._seconds, {"kind": "seconds", "iteration": iteration, "rank": self._rank, "seconds": values})

    def _add_plan(self, line: Mapping[str, Any]) -> None:
        assert self._plans is not None, "this rank has info"
        _append(self._plans, line)


def _open(path: Path, *, resume: bool) -> FileIO:
    """A file without a buffer; one that is resumed ends with the last whole line that a killed run left."""
    file = path.open("a+b" if resume else "wb", buffering=0)
    if resume:
        start = file.seek(max(file.seek(0, os.SEEK_END) - _MAX_LINE, 0))
        file.truncate(start + file.readall().rfind(b"\n") + 1)
    return file


def _append(file: FileIO, line: Mapping[str, Any]) -> None:
    for piece in _pieces(line):
        text = memoryview(piece)
        while text:
            text = text[file.write(text) :]


Write = Callable[[RecordWriter], None]


class RecordThread:
    """Opens a record by `make`, and writes to it, both in its thread; `warn` gets what goes wrong, in either thread."""

    def __init__(self, make: Callable[[], RecordWriter], *, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._waiting: queue.Queue[Write | None] = queue.Queue(MAX_WAITING)
        self._num_added = self._num_written = self.num_dropped = 0
        self._failed = False
        # A thread that hangs in the system must not keep the process.
        self._thread = threading.Thread(target=self._write, args=(make,), name="megatron_balance record", daemon=True)
        self._thread.start()

    def add(self, write: Write) -> None:
        """Have the thread call `write` with the writer."""
        if self._failed:
            return
        self._num_added += 1
        try:
            self._waiting.put_nowait(write)
        except queue.Full:
            self.num_dropped += 1
            if self.num_dropped == 1:
                self._warn(f"{MAX_WAITING} lines of the record wait for its disk: later ones are dropped until then.")

    def close(self) -> None:
        """Write the queue, in CLOSE_SECONDS at most."""
        try:
            self._waiting.put(None, timeout=CLOSE_SECONDS)
            self._thread.join(CLOSE_SECONDS)
        except queue.Full:
            pass
        missing = 0 if self._failed else self._num_added - self._num_written
        if missing:
            self._warn(f"{missing} of {self._num_added} lines of the record were not written: its disk is too slow.")

    def _write(self, make: Callable[[], RecordWriter]) -> None:
        try:
            with contextlib.closing(make()) as writer:
                while (write := self._waiting.get()) is not None:
                    write(writer)
                    self._num_written += 1
        except OSError as error:
            self._failed = True
            self._warn(f"{error}. Training continues without the record; name a folder that every node can write to.")
