"""`training_run.train` without the seconds that every rank spends on imports: its ranks are forks of one process.

That process lives as long as the tests do; `forked.py` says what a fork is. It has writers of
scalars: `fake_tensorboard.py`, and W&B without a network. Tests of the launcher, of other scripts and of what torchrun
does start theirs with `training_run.train`.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training_run import ENVIRONMENT, Recorded, RunFailed, read_records, search_path


def train(record: Path, flags: Sequence[str], *, num_ranks: int, **keywords: Any) -> Recorded:
    """As `forked.train_forked`, with its keywords; the output is that of rank 0.

    Raises:
        RunFailed: a rank ended with an error, or the run was killed.
    """
    keywords = {"timeout_seconds": 300, **keywords}
    call("forked_runs:train_here", str(record), list(flags), num_ranks=num_ranks, **keywords)
    output = (record / "rank0.log").read_text(errors="replace")
    return Recorded(ranks=read_records(record, num_ranks=num_ranks), output=output)


def call(function: str, *positional: Any, **keywords: Any) -> Any:
    """Call a function in the process that ranks are forks of.

    Args:
        function: `MODULE:NAME`.
        positional: its arguments, in JSON's types, as is what it returns.
        keywords: likewise.

    Raises:
        RunFailed: as the function does.
    """
    server = _server()
    assert server.stdin is not None, "a pipe"
    assert server.stdout is not None, "a pipe"
    server.stdin.write(json.dumps([function, positional, keywords]) + "\n")
    server.stdin.flush()
    try:
        answer, problem = json.loads(server.stdout.readline())
    except BaseException:  # a test's time-out: its answer would be taken for that of a later call
        server.kill()
        _server.cache_clear()
        raise
    if problem is not None:
        raise RunFailed(problem)
    return answer


def train_here(record: str, flags: Sequence[str], **keywords: Any) -> None:
    """`train` in the process that ranks are forks of."""
    from forked import train_forked

    train_forked(Path(record), flags, **keywords)


@functools.cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, __file__],
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": search_path(), "WANDB_MODE": "offline", "WANDB_SILENT": "true"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.kill)
    return server


def _serve() -> None:
    from fake_tensorboard import install_fake_tensorboard
    from forked import import_once

    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # some modules print lines when they are imported
    install_fake_tensorboard()
    import_once()
    for line in sys.stdin:
        function, positional, keywords = json.loads(line)
        module, name = function.split(":")
        answer = problem = None
        try:
            answer = getattr(importlib.import_module(module), name)(*positional, **keywords)
        except RunFailed as error:
            problem = str(error)
        answers.write(json.dumps([answer, problem]) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
