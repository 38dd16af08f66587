"""Gloo ranks that run one case of a test after another: forks of one server, which has imported once what they need."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

CASE_SECONDS = 300
"""Far more than a case takes, or a system to import: machines are shared."""

MORE_SECONDS = 10
"""For the other ranks once one has failed: they may wait for it."""


def preload(modules: Sequence[str]) -> None:
    """Import modules in the server; before its first ranks."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))
    with pytest.MonkeyPatch.context() as environment:  # the server does not take over sys.path
        environment.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        environment.setenv("OMP_NUM_THREADS", "1")
        forkserver.ensure_running()


def run_ranks(num_ranks: int, case: str, **arguments: Any) -> list[Any]:
    """A case on ranks of its own."""
    world = World(num_ranks)
    try:
        return world.run(case, **arguments)
    finally:
        world.stop()


class World:
    """`num_ranks` processes, which start with the first case; one of these `modules` has those named without one."""

    def __init__(self, num_ranks: int, *modules: str) -> None:
        self.num_ranks = num_ranks
        self.modules = modules
        self.processes: list[Any] = []
        self.connections: list[Connection] = []

    def start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        self.folder = tempfile.TemporaryDirectory()
        for rank in range(self.num_ranks):
            ours, theirs = context.Pipe()
            arguments = (rank, self.num_ranks, self.folder.name, theirs, self.modules)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)

    def run(self, case: str, **arguments: object) -> list[Any]:
        """What `MODULE:FUNCTION`, or a function of the modules, returns on every rank.

        A case that fails or hangs on some rank fails the test, with every rank's traceback, and ends the processes;
        the next case starts new ones.
        """
        if not self.processes:
            self.start()
        for connection in self.connections:
            connection.send((case, arguments))
        outcomes = self._outcomes()
        failures = [f"rank {rank}: {value}" for rank, (state, value) in sorted(outcomes.items()) if state == "failed"]
        if failures:
            self.stop()
            pytest.fail("\n".join(failures), pytrace=False)
        return [outcomes[rank][1] for rank in range(self.num_ranks)]

    def _outcomes(self) -> dict[int, tuple[str, Any]]:
        outcomes: dict[int, tuple[str, Any]] = {}
        until = time.monotonic() + CASE_SECONDS
        while len(outcomes) < self.num_ranks:
            waiting = [connection for rank, connection in enumerate(self.connections) if rank not in outcomes]
            answered = wait(waiting, timeout=max(until - time.monotonic(), 0))
            if not answered:
                return dict.fromkeys(range(self.num_ranks), ("failed", "no answer: it hangs")) | outcomes
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


def _serve(rank: int, num_ranks: int, folder: str, connection: Connection, modules: Sequence[str]) -> None:
    import torch
    import torch.distributed as dist
    from cpu_shim import share_gloo_device

    torch.set_num_threads(1)
    share_gloo_device()
    store, timeout = f"file://{folder}/rendezvous", timedelta(minutes=2)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks, timeout=timeout)
    while True:
        try:
            case, arguments = connection.recv()
        except EOFError:
            return
        try:
            named, _, name = case.rpartition(":")
            found = (getattr(importlib.import_module(module), name, None) for module in ([named] if named else modules))
            answer = next(filter(None, found))(**arguments)
            _destroy_groups(dist)
            connection.send(("done", answer))
        except Exception:  # noqa: BLE001  # reported to the test, which fails
            connection.send(("failed", traceback.format_exc()))


def _destroy_groups(dist: Any) -> None:
    """Ends the groups of a case, whose threads poll: after fifty cases they would be a thousand a rank."""
    dist.barrier()  # no rank needs them any more
    if "megatron.core.parallel_state" in sys.modules:
        sys.modules["megatron.core.parallel_state"].destroy_model_parallel()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    gc.collect()
