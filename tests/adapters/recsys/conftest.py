"""Ranks over gloo for a case, and the double of recsys-examples in the path.

The processes are forked from a server that has imported torchrec once, which takes seconds.
"""

import multiprocessing
import multiprocessing.forkserver
import os
import sys
import tempfile
import traceback
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CASE_SECONDS = 60

sys.path[:0] = [str(HERE / "upstream_double"), str(HERE)]


def run_ranks(num_ranks, case, **arguments):
    """Runs a function of recsys_cases.py on every rank: what each returns, in the order of ranks."""
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
        processes = [
            context.Process(target=_rank_main, args=(rank, num_ranks, folder, sender, case, arguments), daemon=True)
            for rank, (_, sender) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        answers = [pipe.recv() if pipe.poll(CASE_SECONDS) else ("failed", "no answer") for pipe, _ in pipes]
        for process in processes:
            process.kill()
            process.join()
    failures = [f"rank {rank}: {value}" for rank, (state, value) in enumerate(answers) if state == "failed"]
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)
    return [value for _, value in answers]


def _rank_main(rank, num_ranks, folder, sender, case, arguments):
    import recsys_cases

    try:
        recsys_cases.join(rank, num_ranks, folder)
        sender.send(("done", getattr(recsys_cases, case)(**arguments)))
    except Exception:  # noqa: BLE001  # reported to the test, which fails
        sender.send(("failed", traceback.format_exc()))


@pytest.fixture(scope="session")
def ranks():
    multiprocessing.get_context("forkserver").set_forkserver_preload(["recsys_cases"])
    with pytest.MonkeyPatch.context() as environment:
        # The server does not take over sys.path.
        environment.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        environment.setenv("OMP_NUM_THREADS", "1")
        multiprocessing.forkserver.ensure_running()
    return run_ranks
