"""Runs one training over two hosts, two ranks on each, with trouble on the link where a case asks for it.

Invariant: nothing ends a rank but itself. torchrun looks at its ranks so seldom that a rank whose neighbour failed
has the time to end with its own error; only then are both torchruns terminated.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training_run import ENVIRONMENT, ROOT, command_of

from benchmarks.hosts.network import ADDRESSES, INTERFACE, Network

RANKS_A_HOST = 2
NUM_RANKS = RANKS_A_HOST * len(ADDRESSES)
_PORT = 29400
_SELDOM_SECONDS = 3600


@dataclass(frozen=True)
class RankEnd:
    exit_code: int | None
    seconds: float
    error: str = ""
    message: str = ""
    waited_in: str = ""


@dataclass(frozen=True)
class TwoHostRun:
    steps: list[dict[str, Any]]
    ends: list[RankEnd]
    seconds: float
    logs: Path


def run_on(
    network: Network,
    *,
    folder: Path,
    flags: Sequence[str],
    trouble: Callable[[], None] | None = None,
    after_step: int = 0,
    timeout_seconds: float = 300,
) -> TwoHostRun:
    """Train over both hosts, into a new folder; `trouble` is called once every rank has done `after_step` steps."""
    folder.mkdir(parents=True)
    began = time.monotonic()
    watched = trouble is not None
    hosts = [_start(network, host=host, folder=folder, flags=flags, watched=watched) for host in (0, 1)]
    troubled = began
    ends: dict[int, RankEnd] = {}
    try:
        while len(ends) < NUM_RANKS and time.monotonic() < began + timeout_seconds:
            time.sleep(0.05)
            if trouble is not None and _steps_done(folder) >= after_step:
                trouble()
                trouble, troubled = None, time.monotonic()
            for rank in set(range(NUM_RANKS)) - set(ends):
                code = _exit_code(folder, rank=rank, host_process=hosts[rank // RANKS_A_HOST])
                if code is not None:
                    ends[rank] = RankEnd(code, time.monotonic() - troubled, **_note(folder, rank=rank))
    finally:
        for host in hosts:
            if watched or len(ends) < NUM_RANKS:
                host.terminate()  # torchrun ends its ranks when it is told to end
        for host in hosts:
            host.wait()
    hung = RankEnd(None, time.monotonic() - troubled)
    records = [_steps(folder, rank=rank) for rank in range(NUM_RANKS)]
    return TwoHostRun(
        steps=next((steps for steps in records if steps and "lm_loss" in steps[0]), []),
        ends=[ends.get(rank, hung) for rank in range(NUM_RANKS)],
        seconds=time.monotonic() - began,
        logs=folder / "logs",
    )


def _start(
    network: Network, *, host: int, folder: Path, flags: Sequence[str], watched: bool
) -> subprocess.Popen[bytes]:
    rendezvous = ["--nnodes", "2", "--node-rank", str(host), "--master-addr", ADDRESSES[0], "--master-port", str(_PORT)]
    rendezvous += [
        "--local-addr",
        ADDRESSES[host],
        "--log-dir",
        str(folder / "logs" / f"host{host}"),
        "--redirects",
        "3",
    ]
    if watched:
        rendezvous += ["--monitor-interval", str(_SELDOM_SECONDS)]
    script = ROOT / "benchmarks" / "hosts" / "rank.py"
    command = command_of(folder, flags, num_ranks=RANKS_A_HOST, script=script, rendezvous=rendezvous)
    with (folder / f"host{host}.log").open("wb") as log:
        return subprocess.Popen(
            network.command(host, command),
            env=os.environ | ENVIRONMENT | {"GLOO_SOCKET_IFNAME": INTERFACE},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _exit_code(folder: Path, *, rank: int, host_process: subprocess.Popen[bytes]) -> int | None:
    """Of a rank that has ended, also while its torchrun does not know yet."""
    pid = folder / f"rank{rank}.pid"
    if not pid.exists() or not pid.read_text():
        return host_process.poll()
    try:
        # Fields after the name in brackets: the state is the 1st of them, the exit code the last.
        fields = Path(f"/proc/{pid.read_text()}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return host_process.poll()
    if fields[0] != "Z":
        return None
    return os.waitstatus_to_exitcode(int(fields[-1]))


def _note(folder: Path, *, rank: int) -> dict[str, str]:
    note = folder / f"rank{rank}.end.json"
    return json.loads(note.read_text()) if note.exists() else {}


def _steps_done(folder: Path) -> int:
    return min(len(_steps(folder, rank=rank)) for rank in range(NUM_RANKS))


def _steps(folder: Path, *, rank: int) -> list[dict[str, Any]]:
    record = folder / f"rank{rank}.jsonl"
    # A line is whole when its end was written.
    lines = record.read_text().splitlines(keepends=True) if record.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
