"""Kills one of two nodes of an elastic torchrun: it starts the ranks of the other again, which resume.

The nodes are two agents of torchrun on this machine, with two ranks each. torchrun starts ranks again with the same
command line, so that this names the checkpoints as --load from the beginning.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from forked import free_port
from training_run import ENVIRONMENT, RunFailed, command_of, read_records, search_path

from benchmarks.resume.cases import SAVE_INTERVAL, Case
from benchmarks.resume.killed import TIMEOUT_SECONDS, Killer, compare

NUM_NODES = 2
RANKS_A_NODE = 2

_TORCHRUN = (
    f"--nnodes=1:{NUM_NODES} --max-restarts=3 --rdzv-backend=c10d --rdzv-id=elastic --local-addr=127.0.0.1 "
    "--rdzv-conf=last_call_timeout=3,is_host={is_host}"
)
"""Seconds that it waits for further nodes once there is one. The node that hosts the rendezvous has to live."""

_FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Ranks that are started again otherwise meet in the store of the ranks before, and gloo finds their addresses."""

_LOADED = re.compile(r"successfully loaded checkpoint .* at iteration (\d+)")


@dataclass(frozen=True)
class ElasticRun:
    resumed: list[dict[str, Any]]
    resumed_at: int
    num_ranks: int


def lose_a_node(case: Case, *, folder: Path, data: str, rng: np.random.Generator) -> ElasticRun:
    """Train on two nodes until the second is killed, then to the end on the first."""
    assert (case.ranks, case.ranks_after) == (NUM_NODES * RANKS_A_NODE, RANKS_A_NODE), "ranks of the nodes"
    checkpoints, record = folder / "checkpoints", folder / "record"
    flags = f"{case.flags} {data} --save {checkpoints} --load {checkpoints} --save-interval {SAVE_INTERVAL}".split()
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    rendezvous = [[*_TORCHRUN.format(is_host=node == 0).split(), endpoint] for node in range(NUM_NODES)]
    commands = [command_of(record, flags, num_ranks=RANKS_A_NODE, rendezvous=address) for address in rendezvous]
    killer = Killer(record, num_ranks=case.ranks, rng=rng)
    logs = [folder / f"node{node}.log" for node in range(NUM_NODES)]
    nodes = [_started(command, log=log) for command, log in zip(commands, logs, strict=True)]
    try:
        until = time.monotonic() + TIMEOUT_SECONDS
        while nodes[0].poll() is None and time.monotonic() < until:
            if not killer.has_killed:
                killer(dict.fromkeys(_processes_of(nodes[1].pid), killer.victim or 0))
            time.sleep(0.02)
    finally:
        for node in nodes:
            for pid in list(_processes_of(node.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            node.wait()
    printed = "".join(log.read_text(errors="replace") for log in logs)
    if not killer.has_killed or nodes[0].returncode:
        raise RunFailed(
            f"{'ended with' if killer.has_killed else 'not killed:'} {nodes[0].returncode}: {printed[-3000:]}"
        )
    ranks = read_records(record, num_ranks=RANKS_A_NODE)
    resumed = next(steps for steps in ranks if steps and "lm_loss" in steps[0])
    starts = [int(start) for start in _LOADED.findall(printed)]
    return ElasticRun(resumed, starts[-1] if starts else 0, num_ranks=len(resumed[0]["ranks"]))


def node_lost(folder: Path, data: str, whole_of: Any) -> str:
    """The second of two nodes dies; the problem, or nothing."""
    case = Case("by FLOPs", ranks=NUM_NODES * RANKS_A_NODE, ranks_after=RANKS_A_NODE, overlap=True)
    run = lose_a_node(case, folder=folder, data=data, rng=np.random.default_rng(0))
    if run.num_ranks != case.ranks_after:
        return f"went on with {run.num_ranks} ranks"
    if run.resumed_at == 0:
        return "began again"
    whole = whole_of(case, data=data)
    return compare(run.resumed, whole=whole, start=run.resumed_at, bit_for_bit=False).problem


def _started(command: Sequence[str], *, log: Path) -> subprocess.Popen[bytes]:
    log.parent.mkdir(parents=True, exist_ok=True)
    environment: Mapping[str, str] = os.environ | ENVIRONMENT | _FRESH_STORE | {"PYTHONPATH": search_path()}
    with log.open("wb") as out:
        return subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)


def _processes_of(pid: int) -> Iterator[int]:
    """A process and all that it started, those first that would start others again."""
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # it has ended
        return
    for child in map(int, children):
        yield from _processes_of(child)
