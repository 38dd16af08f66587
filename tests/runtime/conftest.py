"""A world of gloo processes that lives for the whole test session: starting one costs seconds, a case milliseconds."""

import os
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
START_SECONDS = 60
CASE_SECONDS = 60


class World:
    """`num_ranks` processes, each running `rank_main.py` and waiting for the name of a case to run."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.processes: list[subprocess.Popen] = []
        self.connections: list[Connection] = []

    def start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        key = os.urandom(16)
        search_path = os.pathsep.join([str(REPOSITORY), *filter(None, sys.path)])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RANK_MAIN_KEY": key.hex(), "PYTHONPATH": search_path}
        with Listener(str(Path(self.folder.name) / "socket"), "AF_UNIX", authkey=key, backlog=8) as listener:
            for rank in range(self.num_ranks):
                command = [sys.executable, str(HERE / "rank_main.py"), str(rank), str(self.num_ranks), self.folder.name]
                self.processes.append(subprocess.Popen(command, env=environment))
            # A rank that dies before it connects must not hang the session.
            listener._listener._socket.settimeout(START_SECONDS)  # type: ignore[attr-defined]
            try:
                arrived = [listener.accept() for _ in range(self.num_ranks)]
            except TimeoutError:
                self.stop()
                pytest.fail(f"the ranks of a world of {self.num_ranks} did not start", pytrace=False)
        self.connections = [connection for _, connection in sorted((c.recv(), c) for c in arrived)]

    def run(self, case: str, *, seconds: float = CASE_SECONDS, **arguments: object) -> list:
        """Run a case of the modules `*_cases.py` on every rank: what each returns, in the order of ranks.

        A case that fails or hangs on some rank fails the test, with every rank's traceback, and ends the processes;
        the next case starts new ones.
        """
        outcomes = self.outcomes(case, seconds=seconds, **arguments)
        failures = [f"rank {rank}: {value}" for rank, (state, value) in enumerate(outcomes) if state == "failed"]
        if failures:
            self.stop()
            pytest.fail("\n".join(failures), pytrace=False)
        return [value for _, value in outcomes]

    def outcomes(self, case: str, *, seconds: float = CASE_SECONDS, **arguments: object) -> list[tuple[str, Any]]:
        """`done` and what the case returned, or `failed` and why, rank by rank."""
        if not self.processes:
            self.start()
        for connection in self.connections:
            connection.send((case, arguments))
        return [_outcome(connection, seconds=seconds) for connection in self.connections]

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for connection in self.connections:
            connection.close()
        if self.processes:
            self.folder.cleanup()
        self.processes, self.connections = [], []


def _outcome(connection: Connection, *, seconds: float) -> tuple:
    if not connection.poll(seconds):
        return "failed", f"no answer in {seconds} s"
    try:
        return connection.recv()
    except EOFError:
        return "failed", "the process ended"


def _world(num_ranks: int):
    world = World(num_ranks)
    yield world
    world.stop()


@pytest.fixture(scope="session")
def world1():
    yield from _world(1)


@pytest.fixture(scope="session")
def world2():
    yield from _world(2)


@pytest.fixture(scope="session")
def world4():
    yield from _world(4)
