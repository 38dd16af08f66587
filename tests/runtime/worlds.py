"""Gloo ranks that run one case after another: forks of one parent, which has imported once."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

CASE_SECONDS = 500
"""Far more than a case takes: machines are shared."""


MORE_SECONDS = 10


class World:
    """`num_ranks` processes, each running `rank_main.py` and waiting for the name of a case to run."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.processes: list[Any] = []
        self.connections: list[Connection] = []

    def start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["rank_main"])
        with pytest.MonkeyPatch.context() as environment:  # of the parent of all ranks
            environment.setenv("OMP_NUM_THREADS", "1")
            environment.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
            forkserver.ensure_running()
        self.folder = tempfile.TemporaryDirectory()
        for rank in range(self.num_ranks):
            ours, theirs = context.Pipe()
            arguments = (rank, self.num_ranks, self.folder.name, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)

    def run(self, case: str, *, seconds: float = CASE_SECONDS, **arguments: object) -> list[Any]:
        """Run a case of the modules `*_cases.py` on every rank: what each returns, in the order of ranks.

        A case that fails or hangs on some rank fails the test, with every rank's traceback, and ends the processes;
        the next case starts new ones.
        """
        if not self.processes:
            self.start()
        for connection in self.connections:
            connection.send((case, arguments))
        outcomes = self._outcomes(seconds)
        failures = [f"rank {rank}: {value}" for rank, (state, value) in sorted(outcomes.items()) if state == "failed"]
        if failures:
            self.stop()
            pytest.fail("\n".join(failures), pytrace=False)
        return [outcomes[rank][1] for rank in range(self.num_ranks)]

    def _outcomes(self, seconds: float) -> dict[int, tuple[str, Any]]:
        """Of every rank; where one has failed the others, which may wait for it, get a few seconds more."""
        outcomes: dict[int, tuple[str, Any]] = {}
        until = time.monotonic() + seconds
        while len(outcomes) < self.num_ranks:
            waiting = [connection for rank, connection in enumerate(self.connections) if rank not in outcomes]
            answered = wait(waiting, timeout=max(until - time.monotonic(), 0))
            if not answered:
                return dict.fromkeys(range(self.num_ranks), ("failed", "no answer")) | outcomes
            for connection in answered:
                try:
                    outcome = connection.recv()
                except EOFError:
                    outcome = ("failed", "the process ended")
                outcomes[self.connections.index(connection)] = outcome
                if outcome[0] == "failed":
                    until = min(until, time.monotonic() + MORE_SECONDS)
        return outcomes

    def stop(self) -> None:
        for process, connection in zip(self.processes, self.connections, strict=True):
            process.kill()
            process.join()
            connection.close()
        if self.processes:
            self.folder.cleanup()
        self.processes, self.connections = [], []


def _serve(*arguments: Any) -> None:
    import rank_main  # loaded there already

    rank_main.serve(*arguments)
