"""Gloo ranks that run one case after another: forks of one parent, which has imported once."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

import pytest

CASE_SECONDS = 200
"""Far more than a case takes: machines are shared."""


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
        outcomes = [_outcome(connection, seconds=seconds) for connection in self.connections]
        failures = [f"rank {rank}: {value}" for rank, (state, value) in enumerate(outcomes) if state == "failed"]
        if failures:
            self.stop()
            pytest.fail("\n".join(failures), pytrace=False)
        return [value for _, value in outcomes]

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


def _outcome(connection: Connection, *, seconds: float) -> tuple[str, Any]:
    if not connection.poll(seconds):
        return "failed", f"no answer in {seconds} s"
    try:
        return connection.recv()
    except EOFError:
        return "failed", "the process ended"
