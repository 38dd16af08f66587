"""Plans in a process of its own: a thread that plans would hold the interpreter's lock for up to 5 ms at a time.

Invariants: the plan is the one that `build_data_schedule` makes here; the process ends with this one, however that ends
(`serve`), and not by signals to all processes of a run; a process that has failed ends no training: the
rank warns, and makes this plan and all later ones itself, which are the same.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from megatron_balance.errors import BalanceError
from megatron_balance.planner import DataSchedule, build_data_schedule

_MAIN = (
    "import sys; sys.path[:] = sys.argv[3:]; from megatron_balance.mcore.plan_process import serve; "
    "serve(int(sys.argv[1]), parent=int(sys.argv[2]))"
)
_LEFT_TO_PARENT = {signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
"""Blocked in the planning process: the parent decides whether they end the run, as under `--exit-signal-handler`."""

_ENDED = (
    "plans: the planning process ({pid}) has ended with exit code {code} ({error!r}). -9 usually means the OOM killer; "
    "or there was no answer in {seconds:g} s: where it was only slow, raise --distributed-timeout-minutes.\n"
    "Training continues: plans are made in the training process from here on."
)
_ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}

MIN_SAMPLES = 256
"""Samples of a global batch from which on it is planned in the process. Fewer take milliseconds."""

PARENT_CHECK_SECONDS = 1.0
"""Time between two looks of a planning process at its parent's id."""


class PlanProcess:
    """Plans global batches, large ones in a process, which is killed if it has no answer before peers stop waiting."""

    def __init__(self, *, timeout: timedelta, warn: Callable[[str], None] = lambda text: None) -> None:
        self._warn = warn
        self._seconds = timeout.total_seconds()
        self._failed = False
        self.num_fallbacks = 0  # plans made here since the process failed
        self._started: tuple[Connection[Any, Any], subprocess.Popen[bytes]] | None = None

    @property
    def pid(self) -> int | None:
        """Process id; None before the first large batch."""
        return None if self._started is None else self._started[1].pid

    def plan(self, *, num_samples: int, **arguments: Any) -> DataSchedule:
        """`build_data_schedule` with these keywords, for a global batch of so many samples, wherever it runs."""
        if num_samples >= MIN_SAMPLES and not self._failed:
            try:
                answer = self._ask(arguments)
            except (EOFError, OSError) as error:
                self._failed = True
                self.close()
                code = None if self._started is None else self._started[1].returncode
                self._warn(_ENDED.format(pid=self.pid, code=code, error=error, seconds=self._seconds))
            else:
                if isinstance(answer, BalanceError):  # of the arguments
                    raise answer
                return answer
        self.num_fallbacks += self._failed
        return build_data_schedule(**arguments)

    def close(self) -> None:
        """End the process."""
        if self._started is not None:
            connection, process = self._started
            connection.close()
            process.kill()
            process.wait()

    def _ask(self, arguments: dict[str, Any]) -> DataSchedule | BalanceError:
        connection, process = self._started = self._started or self._start()
        watchdog = threading.Timer(self._seconds, process.kill)
        watchdog.start()
        try:
            connection.send(arguments)
            return connection.recv()
        finally:
            watchdog.cancel()

    def _start(self) -> tuple[Connection[Any, Any], subprocess.Popen[bytes]]:
        parent_end, child_end = Pipe()
        # A mask set afterwards would leave a moment in which a signal to all processes ends this one.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_PARENT)
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", _MAIN, str(child_end.fileno()), str(os.getpid()), *sys.path],
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | _ONE_THREAD,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            child_end.close()
        # Here, since it loads torch, and the planning process, which imports this file, needs numpy alone.
        from megatron_balance.runtime.process import close_on_undo

        close_on_undo(self.close)
        return parent_end, process


def serve(number: int, *, parent: int) -> None:
    """Answers requests, the keywords of `build_data_schedule`, by the plan or the BalanceError of the arguments.

    It ends with the parent, whose id is compared, too: children that the parent forks hold the connection open as well.
    """
    connection: Connection[Any, Any] = Connection(number)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while os.getppid() == parent:
            if connection.poll(PARENT_CHECK_SECONDS):
                try:
                    answer = build_data_schedule(**connection.recv())
                except BalanceError as error:
                    answer = error
                connection.send(answer)
