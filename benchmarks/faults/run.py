"""Runs one training with a fault, rank by rank; nothing ends a rank from outside, so its error and its end are its own.

Ranks are not started by torchrun, which would end them all as soon as it sees one that has failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training_run import search_path

from benchmarks.equality.forked import free_port
from benchmarks.faults.cases import GLOBAL_BATCH_SIZE, NUM_STEPS, START_MINUTES, STEP, TIMEOUT_SECONDS, Fault
from megatron_balance.devkit.smoke import CPU_FLAGS, ENVIRONMENT, MODEL_FLAGS, TRAINING_FLAGS

LIMIT_SECONDS = 600
"""After which a rank counts as hanging. The machine may be busy."""

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64 "
    "--seq-length 256 "
    f"--max-position-embeddings 256 --global-batch-size {GLOBAL_BATCH_SIZE} --train-iters {NUM_STEPS} "
    f"--distributed-timeout-minutes {START_MINUTES} --distributed-timeout-seconds-after-init {TIMEOUT_SECONDS}"
)

_OURS = r"megatron_balance: (?!iteration \d+ \||WARNING: (?!rank \d+ prepares))"
"""Neither a step's figures nor a warning of something else."""


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended.

    Attributes:
        exit_code: negative for a signal; None where it still ran after the limit.
        seconds: from the strike, or else from the first rank's end, to this one's; 0 for the first.
        output: all that it printed.
    """

    exit_code: int | None
    seconds: float
    output: str

    @property
    def last_word(self) -> str:
        """What this package said of the fault, else the error that ended the rank, else its last line."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip() and "nanobind" not in line]
        ours = [line for line in lines if re.match(_OURS, line)]
        errors = [line for line in lines if re.match(r"[\w.]*(Error|KeyboardInterrupt)\b", line)]
        return (ours or errors or lines or [""])[-1]


@dataclass(frozen=True)
class Outcome:
    """What became of a run.

    Attributes:
        ends: of every rank.
        wrong: what is not as it must be, empty where all is.
    """

    ends: list[RankEnd]
    wrong: list[str]


class Nursery:
    """Starts ranks; see nursery.py. A context: ranks end with it."""

    def __enter__(self) -> Nursery:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.faults.nursery"],
            env=os.environ | ENVIRONMENT | {"PYTHONPATH": search_path()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None, "a pipe"
        self._process.stdin.close()
        self._process.wait()

    def ask(self, request: dict[str, Any]) -> Any:
        """A request, and its answer."""
        assert self._process.stdin is not None, "a pipe"
        assert self._process.stdout is not None, "a pipe"
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def run_with(fault: Fault, *, folder: Path, nursery: Nursery) -> Outcome:
    """Train with a fault.

    Args:
        fault: what happens.
        folder: for logs; must be new.
        nursery: starts the ranks.
    """
    folder.mkdir(parents=True)
    port = free_port()
    ranks = [_rank(fault, rank=rank, port=port, folder=folder) for rank in range(fault.num_ranks)]
    rank_of = {pid: rank for rank, pid in enumerate(nursery.ask({"ranks": ranks}))}
    codes: dict[int, int] = {}
    ended: dict[int, float] = {}
    limit = time.monotonic() + LIMIT_SECONDS
    waited_for = set(range(fault.num_ranks)) - (set(fault.ranks) if fault.dies else set())

    def poll() -> None:
        for pid, code in nursery.ask({"poll": True}).items():
            codes[rank_of[int(pid)]] = code
            ended[rank_of[int(pid)]] = time.monotonic()

    while waited_for - set(ended) and time.monotonic() < limit:
        time.sleep(0.05)
        poll()
    in_time = dict(codes)
    while len(ended) < fault.num_ranks:
        for pid, rank in rank_of.items():
            if rank not in ended:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)  # ends a stopped one too
        time.sleep(0.05)
        poll()
    strikes = [float(path.read_text()) for path in folder.glob("strike*")]
    began = min([*strikes, *ended.values()])
    ends = [
        RankEnd(
            in_time.get(rank),
            seconds=max(ended[rank] - began, 0.0),
            output=(folder / f"rank{rank}.log").read_text(errors="replace"),
        )
        for rank in range(fault.num_ranks)
    ]
    return Outcome(ends, wrong=[what for rank in sorted(waited_for) for what in _wrong(ends[rank], rank, fault)])


def _wrong(end: RankEnd, rank: int, fault: Fault) -> list[str]:
    """What is not as it must be about a rank that is left."""
    if end.exit_code is None:
        return [f"rank {rank} hangs"]
    wrong = []
    if (end.exit_code == 0) != fault.goes_on:
        wrong.append(f"rank {rank} ended with {end.exit_code}")
    heard = fault.goes_on and rank != 0  # Megatron says on one rank why it ends
    if not heard and not re.search(fault.says, end.output):
        wrong.append(f"rank {rank} says: {end.last_word}")
    return wrong


def _rank(fault: Fault, *, rank: int, port: int, folder: Path) -> dict[str, Any]:
    """What the nursery is asked for."""
    struck = rank in fault.ranks
    balance = fault.balance if fault.flags_there is None or not struck else fault.flags_there
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": fault.num_ranks, "MASTER_PORT": port}
    return {
        "argv": f"{CPU_FLAGS} {MODEL_FLAGS} {TRAINING_FLAGS} {FLAGS} {fault.flags} {balance}".split(),
        "environment": {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in places.items()},
        "log": str(folder / f"rank{rank}.log"),
        "folder": str(folder),
        "hooked": fault.hooked or not struck,
        "strike": fault.strike if struck else "none",
        "step": STEP,
        "global_batch_size": GLOBAL_BATCH_SIZE,
    }
