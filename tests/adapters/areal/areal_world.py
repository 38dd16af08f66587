"""Gloo ranks that live for a session's tests: starting them costs seconds, a case milliseconds.

Run as a script it imports what all ranks need, AReaL takes seconds, and forks them. A rank joins the group, then runs
the functions that are named to it, `module:function`.
"""

import importlib
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from datetime import timedelta
from multiprocessing.connection import Client, Listener
from pathlib import Path

import pytest

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]
WAIT_SECONDS = 180  # longer than AReaL takes to import on a busy machine


class World:
    """`num_ranks` processes that wait for cases, with `modules` imported."""

    def __init__(self, num_ranks: int, *, modules: tuple[str, ...]) -> None:
        self.num_ranks = num_ranks
        self.modules = modules
        self.folder = tempfile.TemporaryDirectory()
        self.process: subprocess.Popen | None = None
        self.connections: list = []

    def start(self) -> None:
        key = os.urandom(16)
        search_path = os.pathsep.join([str(REPOSITORY), *filter(None, sys.path)])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "AREAL_WORLD_KEY": key.hex(), "PYTHONPATH": search_path}
        with Listener(str(Path(self.folder.name) / "socket"), "AF_UNIX", authkey=key, backlog=8) as listener:
            command = [sys.executable, __file__, str(self.num_ranks), self.folder.name, *self.modules]
            self.process = subprocess.Popen(command, env=environment, start_new_session=True)
            # A rank that dies before it connects must not hang the session.
            listener._listener._socket.settimeout(WAIT_SECONDS)  # type: ignore[attr-defined]
            arrived = [listener.accept() for _ in range(self.num_ranks)]
        self.connections = [connection for _, connection in sorted((c.recv(), c) for c in arrived)]

    def run(self, case: str, **arguments: object) -> list:
        """Results of the function on every rank. One that fails or hangs on some rank fails the test."""
        if self.process is None:
            self.start()
        for connection in self.connections:
            connection.send((case, arguments))
        outcomes = [_outcome(connection) for connection in self.connections]
        failures = [f"rank {rank}: {value}" for rank, (state, value) in enumerate(outcomes) if state == "failed"]
        if failures:
            self.stop()
            pytest.fail("\n".join(failures), pytrace=False)
        return [value for _, value in outcomes]

    def stop(self) -> None:
        if self.process is not None:
            # The session it leads: itself and its ranks.
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for connection in self.connections:
            connection.close()
        self.process, self.connections = None, []


def _outcome(connection) -> tuple:
    if not connection.poll(WAIT_SECONDS):
        return "failed", f"no answer in {WAIT_SECONDS} s: it hangs"
    try:
        return connection.recv()
    except EOFError:
        return "failed", "the process ended"


def main() -> None:
    num_ranks, folder, *modules = sys.argv[1:]
    for module in modules:
        importlib.import_module(module)
    ranks = list(range(int(num_ranks)))
    children = []
    for rank in ranks:
        child = os.fork()
        if not child:
            be_rank(rank, num_ranks=len(ranks), folder=folder)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def be_rank(rank: int, *, num_ranks: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    connection = Client(f"{folder}/socket", "AF_UNIX", authkey=bytes.fromhex(os.environ["AREAL_WORLD_KEY"]))
    connection.send(rank)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=WAIT_SECONDS),
    )
    while True:
        try:
            case, arguments = connection.recv()
        except EOFError:
            return
        module, function = case.split(":")
        try:
            connection.send(("done", getattr(importlib.import_module(module), function)(**arguments)))
        except Exception:  # noqa: BLE001  # reported to the test, which fails
            connection.send(("failed", traceback.format_exc()))


if __name__ == "__main__":
    main()
