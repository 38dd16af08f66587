"""Forks ranks from a process that has imported torch and Megatron: a run then costs only its steps.

    python -m benchmarks.faults.nursery

Reads a request a line, as JSON, and answers with a line: `{"ranks": [RANK, ...]}` starts processes and gives their ids,
`{"poll": true}` gives the ids and exit codes of those that have ended since. A rank leaves as any Python program does:
its threads are waited for, and what was registered for the end is run. It is ended with this process.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.equality.forked import import_once
from megatron_balance.errors import BalanceError

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve, and in a fork be the rank that was asked for."""
    import_once()
    rank = _serve()
    if rank is not None:
        _be(rank)


def _serve() -> dict[str, Any] | None:
    """None when nobody asks any more; in a fork, what it is to be."""
    for line in sys.stdin:
        request = json.loads(line)
        answer: Any = {}
        if "ranks" in request:
            answer = []
            for rank in request["ranks"]:
                pid = os.fork()
                if pid == 0:
                    return rank
                answer.append(pid)
        else:
            answer = _ended()
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    return None


def _ended() -> dict[int, int]:
    codes: dict[int, int] = {}
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return codes
            codes[pid] = os.waitstatus_to_exitcode(status)
    except ChildProcessError:  # there are none
        return codes


def _be(rank: dict[str, Any]) -> None:
    """As the launcher would: `rank` holds `log`, `environment`, `argv`, `hooked`, and the strike."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background has it ignored
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    log = os.open(rank["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, nothing), (1, log), (2, log)):
        os.dup2(source, target)
    os.environ |= rank["environment"]
    sys.argv = ["pretrain_sft", *rank["argv"]]

    from benchmarks.faults.strikes import STRIKES, Strike
    from megatron_balance.devkit import pretrain_sft
    from megatron_balance.mcore import hooks

    if not rank["hooked"]:
        hooks.installation.undo()
    if rank["strike"] != "none":
        strike = Strike(
            rank["step"],
            global_batch_size=rank["global_batch_size"],
            rank=int(os.environ["RANK"]),
            folder=Path(rank["folder"]),
        )
        STRIKES[rank["strike"]](strike)
    try:
        pretrain_sft.main()
    except BalanceError as error:
        _end_with(f"megatron_balance: {error}")
    except (Exception, KeyboardInterrupt):  # noqa: BLE001  # to say when it came, before what waits at the end
        traceback.print_exc()
        _end_with(None)


def _end_with(message: str | None) -> NoReturn:
    raise SystemExit(1 if message is None else message)


if __name__ == "__main__":
    main()
