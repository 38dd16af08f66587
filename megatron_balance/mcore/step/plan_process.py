"""Plans in a process of its own, so that planning does not hold the interpreter's lock of the training process.

Every launch of a kernel from Python gives the lock up and takes it back. A thread that plans takes it in between and
holds it for up to `sys.getswitchinterval()`, 5 ms. A thread that waits for a planning process holds no lock.

Invariants: the plan is the one that `build_data_schedule` makes here; the process ends with this one, however that
ends (`planner.build.serve`); signals that a scheduler or a terminal sends to all processes of a run do not end it
before; a process that has failed ends no training: the rank warns, and makes this plan and all later ones itself,
which are the same.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import weakref
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from megatron_balance.errors import BalanceError
from megatron_balance.planner import DataSchedule, build_data_schedule
from megatron_balance.runtime.process import close_on_undo

_MAIN = (
    "import sys; sys.path[:] = sys.argv[3:]; from megatron_balance.planner.build import serve; "
    "serve(int(sys.argv[1]), parent=int(sys.argv[2]))"
)
_LEFT_TO_PARENT = {signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
"""Blocked in the planning process: the parent decides whether they end the run, as under `--exit-signal-handler`."""

_ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
_END_SECONDS = 5.0

MIN_SAMPLES = 256
"""Samples of a global batch from which on it is planned in the process. Fewer take milliseconds."""


class PlanProcessError(BalanceError):
    """The planning process has died, hangs or failed."""


class PlanProcess:
    """Plans global batches, large ones in a process that the first of them starts.

    It counts as hanging after a timeout, below the time that peers wait for this rank.
    """

    def __init__(self, *, timeout: timedelta, warn: Callable[[str], None] = lambda text: None) -> None:
        self._warn = warn
        self._failed = False
        self._seconds = timeout.total_seconds()
        self._connection: Connection[Any, Any] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id; None before the first large batch."""
        return None if self._process is None else self._process.pid

    def plan(self, *, num_samples: int, **arguments: Any) -> DataSchedule:
        """`build_data_schedule` with these keywords, for a global batch of so many samples, wherever it runs."""
        if num_samples >= MIN_SAMPLES and not self._failed:
            try:
                return self._ask(arguments)
            except PlanProcessError as error:
                self._failed = True
                self.close()
                self._warn(f"plans: {error} Training continues: plans are made in the training process from here on.")
        return build_data_schedule(**arguments)

    def _ask(self, arguments: dict[str, Any]) -> DataSchedule:
        """The answer of the process, which may be an error of `build_data_schedule`."""
        try:
            if self._connection is None:
                self._start()
            assert self._connection is not None
            self._connection.send(arguments)
            schedule, error = self._connection.recv()
        except BlockingIOError as late:  # the socket's timeouts
            raise PlanProcessError(
                f"the planning process ({self.pid}) hangs: no answer in {self._seconds:g} s. Where it was only slow, "
                "raise --distributed-timeout-minutes."
            ) from late
        except (EOFError, OSError) as broken:
            raise PlanProcessError(self._how_it_ended(broken)) from broken
        if isinstance(error, str):
            raise PlanProcessError(f"the planning process ({self.pid}) failed:\n{error}")
        if error is not None:
            raise error
        return schedule

    def close(self) -> None:
        """End the process."""
        if self._connection is not None:
            self._finalizer()

    def _start(self) -> None:
        ours, theirs = Pipe()
        with socket.socket(fileno=os.dup(ours.fileno())) as both_directions:
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                timeval = struct.pack("@ll", int(self._seconds), int(self._seconds % 1 * 1e6))
                both_directions.setsockopt(socket.SOL_SOCKET, option, timeval)
        # A mask set afterwards would leave a moment in which a signal to all processes ends this one.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_PARENT)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _MAIN, str(theirs.fileno()), str(os.getpid()), *sys.path],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | _ONE_THREAD,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        self._connection = ours
        self._finalizer = weakref.finalize(self, _end, ours, self._process, os.getpid())
        close_on_undo(self.close)

    def _how_it_ended(self, broken: Exception) -> str:
        if self._process is None:
            return f"the planning process cannot be started: {broken}."
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return f"the planning process ({self.pid}) has closed its connection: {broken!r}."
        how = f"exit code {code}" if code >= 0 else f"signal {-code} ({signal.strsignal(-code)})"
        return f"the planning process ({self.pid}) has ended with {how}. Signal 9 is often the kernel's: out of memory."


def _end(connection: Connection[Any, Any], process: subprocess.Popen[bytes], owner: int) -> None:
    """Ends the process, where this one started it: a fork has no part in it."""
    if os.getpid() == owner:
        connection.close()
        process.kill()
        process.wait()
