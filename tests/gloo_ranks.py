"""Runs a function on gloo ranks, forked from a server that has imported once what they need."""

from __future__ import annotations

import importlib
import multiprocessing
import multiprocessing.forkserver
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

CASE_SECONDS = 120  # longer than a system takes to import on a busy machine


def preload(modules: Sequence[str]) -> None:
    """Imports modules in the server; before its first ranks."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))
    with pytest.MonkeyPatch.context() as environment:
        # The server does not take over sys.path.
        environment.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        environment.setenv("OMP_NUM_THREADS", "1")
        multiprocessing.forkserver.ensure_running()


def run_ranks(num_ranks: int, case: str, **arguments: Any) -> list[Any]:
    """What `module:function` returns on every rank. One that fails or hangs on some rank fails the test."""
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
        processes = [
            context.Process(target=_rank_main, args=(rank, num_ranks, folder, sender, case, arguments), daemon=True)
            for rank, (_, sender) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        answers = [pipe.recv() if pipe.poll(CASE_SECONDS) else ("failed", "no answer: it hangs") for pipe, _ in pipes]
        for process in processes:
            process.kill()
            process.join()
    failures = [f"rank {rank}: {value}" for rank, (state, value) in enumerate(answers) if state == "failed"]
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)
    return [value for _, value in answers]


def _rank_main(rank: int, num_ranks: int, folder: str, sender: Any, case: str, arguments: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    try:
        torch.set_num_threads(1)
        store, timeout = f"file://{folder}/rendezvous", timedelta(seconds=CASE_SECONDS)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks, timeout=timeout)
        module, function = case.split(":")
        sender.send(("done", getattr(importlib.import_module(module), function)(**arguments)))
    except Exception:  # noqa: BLE001  # reported to the test, which fails
        sender.send(("failed", traceback.format_exc()))
