"""Writes a record in a thread of its own, so that no step waits for a file system.

Invariants: `add` takes no time worth naming and raises nothing; lines are written in their order, each handed to the
system before the next one is made, so that a killed process loses its last lines alone; what cannot be written is
counted; neither a file system that hangs nor one that fails ends the process or keeps it from its end.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from megatron_balance.record.run_record import PLAN

MAX_WAITING = 16
"""Lines that wait for the disk, of which the longest holds the plan of a step; later ones are dropped."""

CLOSE_SECONDS = 5.0
"""For what still waits at the end of training."""

_MAX_LINE = 2**26
"""Bytes at the end of a file in which its last line begins."""


def text_of(line: Mapping[str, Any]) -> bytes:
    """A line of a record; arrays are written as lists, each by a call that other threads wait for."""
    dumps = functools.partial(json.dumps, allow_nan=False, default=np.ndarray.tolist)
    items = [f"{dumps(name)}: {dumps(value)}" for name, value in line.items()]
    return f"{{{', '.join(items)}}}\n".encode()


def seconds_line(iteration: int, *, rank: int, seconds: NDArray[np.float64]) -> dict[str, Any]:
    """One step of one rank: `[num_microbatches]` seconds, to nine digits; NaN where a micro-batch was not measured."""
    values = [None if math.isnan(value) else float(f"{value:.9g}") for value in seconds.tolist()]
    return {"kind": "seconds", "iteration": iteration, "rank": rank, "seconds": values}


class RecordWriter:
    """Writes one rank's part of a record: its seconds, and all other lines where it `writes_plans`.

    A record in the folder is replaced, or with `resume` continued. `warn` gets what goes wrong, in either thread.
    """

    def __init__(
        self, folder: Path, *, rank: int, writes_plans: bool, resume: bool, warn: Callable[[str], None]
    ) -> None:
        self._folder, self._resume, self._warn = folder, resume, warn
        self._names = {"seconds": f"seconds_rank{rank:05d}.jsonl"} | ({"plans": PLAN} if writes_plans else {})
        self._waiting: queue.Queue[Mapping[str, Any] | None] = queue.Queue(MAX_WAITING)
        self.num_dropped = 0
        # A thread that hangs in the system must not keep the process.
        self._thread = threading.Thread(target=self._write, name="megatron_balance record", daemon=True)
        self._thread.start()

    def add(self, line: Mapping[str, Any]) -> None:
        """Have the thread write a line; its arrays must not change any more."""
        try:
            self._waiting.put_nowait(line)
        except queue.Full:
            self.num_dropped += 1
            if self.num_dropped == 1:
                self._warn(f"{MAX_WAITING} lines of the record wait for its disk: later ones are dropped until then.")

    def close(self) -> None:
        """Write what waits, in CLOSE_SECONDS at most."""
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=CLOSE_SECONDS)
            self._thread.join(CLOSE_SECONDS)
        if missing := self.num_dropped + sum(line is not None for line in self._waiting.queue):
            self._warn(f"{missing} lines of the record were not written: its disk is too slow.")

    def _write(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with contextlib.ExitStack() as stack:
                files = {kind: stack.enter_context(self._open(name)) for kind, name in self._names.items()}
                while (line := self._waiting.get()) is not None:
                    file = files["seconds" if line["kind"] == "seconds" else "plans"]
                    file.write(text_of(line))
                    file.flush()
        except OSError as error:
            self._warn(f"{error}. Training continues without the record; name a folder that every node can write to.")
            while self._waiting.get() is not None:
                pass

    def _open(self, name: str) -> BinaryIO:
        """A file; one that is resumed ends with the last whole line that a killed run left."""
        file = (self._folder / name).open("a+b" if self._resume else "wb")
        if self._resume:
            start = file.seek(max(file.seek(0, os.SEEK_END) - _MAX_LINE, 0))
            file.truncate(start + file.read().rfind(b"\n") + 1)
        return file
