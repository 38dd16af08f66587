"""Writes a record in a thread of its own, so that no step waits for a file system.

Invariants: `add` takes no time worth naming and raises nothing; lines are written in their order; what cannot be
written is counted; neither a file system that hangs nor one that fails ends the process or keeps it from its end.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from megatron_balance.record.run_record import RecordWriter

MAX_WAITING = 16
"""Lines that wait for the disk, of which the longest holds the plan of a step; later ones are dropped."""

CLOSE_SECONDS = 5.0
"""For what still waits at the end of training."""

Write = Callable[[RecordWriter], None]


class RecordThread:
    """Opens a record by `make`, and writes to it, both in its thread; `warn` gets what goes wrong, in either thread."""

    def __init__(self, make: Callable[[], RecordWriter], *, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._waiting: queue.Queue[Write | None] = queue.Queue(MAX_WAITING)
        self._num_given = self._num_written = self.num_dropped = 0
        self._failed = False
        # A thread that hangs in the system must not keep the process.
        self._thread = threading.Thread(target=self._write, args=(make,), name="megatron_balance record", daemon=True)
        self._thread.start()

    def add(self, write: Write) -> None:
        """Have the thread call `write` with the writer."""
        if self._failed:
            return
        self._num_given += 1
        try:
            self._waiting.put_nowait(write)
        except queue.Full:
            self.num_dropped += 1
            if self.num_dropped == 1:
                self._warn(f"{MAX_WAITING} lines of the record wait for its disk: later ones are dropped until then.")

    def close(self) -> None:
        """Write what waits, in CLOSE_SECONDS at most."""
        try:
            self._waiting.put(None, timeout=CLOSE_SECONDS)
            self._thread.join(CLOSE_SECONDS)
        except queue.Full:
            pass
        if lost := 0 if self._failed else self._num_given - self._num_written:
            self._warn(f"{lost} of {self._num_given} lines of the record were not written: its disk is too slow.")

    def _write(self, make: Callable[[], RecordWriter]) -> None:
        try:
            writer = make()
            while (write := self._waiting.get()) is not None:
                write(writer)
                self._num_written += 1
        except OSError as error:
            self._failed = True
            self._warn(f"{error}. Training continues without the record; name a folder that every node can write to.")
