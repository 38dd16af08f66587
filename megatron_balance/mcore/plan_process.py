"""Plans in a process of its own: a thread that plans would hold the interpreter's lock for up to 5 ms at a time.

Invariants: the plan is the one that `build_data_schedule` makes here; the process ends as its input does, with this
one, and not by signals to all processes of a run; a process that has failed ends no training: the rank warns, and makes
this plan and all later ones itself, which are the same.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from typing import Any

from megatron_balance.errors import BalanceError
from megatron_balance.planner import DataSchedule, build_data_schedule

_MAIN = "import sys; sys.path[:] = sys.argv[1:]; from megatron_balance.mcore.plan_process import serve; serve()"

_LEFT_TO_PARENT = {signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
"""Blocked in the planning process: the parent decides whether they end the run, as under `--exit-signal-handler`."""

_ENDED = (
    "plans: the planning process has ended with exit code {code} ({error!r}). -9 usually means the OOM killer; "
    "or there was no answer in {seconds:g} s: where it was only slow, raise --distributed-timeout-minutes.\n"
    "Training continues: plans are made in the training process from here on."
)
_ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}

MIN_SAMPLES = 256
"""Samples of a global batch from which on it is planned in the process. Fewer take milliseconds."""


class PlanProcess:
    """Plans global batches, large ones in a process, which is killed if it has no answer before peers stop waiting."""

    def __init__(self, *, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()
        self.num_fallbacks = 0  # plans made here since the process failed
        self._process: subprocess.Popen[bytes] | None = None
        self._failed = False

    def plan(self, lengths: Any, **arguments: Any) -> DataSchedule:
        """`build_data_schedule`, wherever it runs."""
        arguments["lengths"] = lengths
        if len(lengths) >= MIN_SAMPLES and not self._failed:
            try:
                answer = self._ask(arguments)
            except (EOFError, OSError, pickle.UnpicklingError) as error:
                from megatron_balance.runtime.log import warn_once

                self._failed = True
                warn_once(_ENDED.format(code=self.close(), error=error, seconds=self._seconds), every_rank=True)
            else:
                if isinstance(answer, BalanceError):  # of the arguments
                    raise answer
                return answer
        self.num_fallbacks += self._failed
        return build_data_schedule(**arguments)

    def close(self) -> int | None:
        """End the process; its exit code, None where none was started."""
        if self._process is None:
            return None
        self._process.kill()
        self._process.communicate()
        return self._process.returncode

    def _ask(self, arguments: dict[str, Any]) -> DataSchedule | BalanceError:
        self._process = process = self._process or self._start()
        assert process.stdin is not None, "it is a pipe"
        assert process.stdout is not None, "and so is this"
        watchdog = threading.Timer(self._seconds, process.kill)
        watchdog.start()
        try:
            pickle.dump(arguments, process.stdin)
            process.stdin.flush()
            return pickle.load(process.stdout)  # noqa: S301 - of a process of our own
        finally:
            watchdog.cancel()

    def _start(self) -> subprocess.Popen[bytes]:
        # Here, since it loads torch, which the planning process, that imports this file, does without.
        from megatron_balance.runtime.process import close_on_undo

        close_on_undo(self.close)
        return subprocess.Popen(
            [sys.executable, "-c", _MAIN, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | _ONE_THREAD,
            start_new_session=True,
        )


def serve() -> None:
    """Answers requests, the keywords of `build_data_schedule`, by the plan or the BalanceError of the arguments."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_PARENT)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            try:
                answer = build_data_schedule(**pickle.load(sys.stdin.buffer))  # noqa: S301
            except BalanceError as error:
                answer = error
            pickle.dump(answer, sys.stdout.buffer)
            sys.stdout.flush()
