"""Runs one training with a fault, rank by rank; nothing ends a rank from outside, so its error and its end are its own.

Ranks are not started by torchrun, which would end them all as soon as it sees one that has failed.
"""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pretrain_sft
from forked import fork_rank, free_port, rank_environment
from training_run import CPU_FLAGS, MODEL_FLAGS, TRAINING_FLAGS

from benchmarks.faults.cases import GLOBAL_BATCH_SIZE, NUM_STEPS, START_MINUTES, STEP, TIMEOUT_SECONDS, Fault
from megatron_balance.errors import BalanceError
from megatron_balance.mcore import hooks

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
    """The end of a rank."""

    exit_code: int | None
    seconds: float
    output: str

    @property
    def last_word(self) -> str:
        """This package's last message, else the error that ended the rank, else its last line."""
        lines = [line.strip() for line in self.output.splitlines()]
        lines = [line for line in lines if line and not line.startswith("- ") and "nanobind" not in line]
        ours = [line for line in lines if re.match(_OURS, line)]
        errors = [line for line in lines if re.match(r"[\w.]*(Error|KeyboardInterrupt)\b", line)]
        return (ours or errors or lines or [""])[-1]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run."""

    ends: list[RankEnd]
    wrong: list[str]


def run_with(fault: Fault, *, folder: Path) -> Outcome:
    """Train with a fault, in forks of this process."""
    folder.mkdir(parents=True)
    port = free_port()
    running = {_start(fault, rank=rank, port=port, folder=folder): rank for rank in range(fault.num_ranks)}
    codes: dict[int, int] = {}
    ended: dict[int, float] = {}
    limit = time.monotonic() + LIMIT_SECONDS
    waited_for = set(range(fault.num_ranks)) - (set(fault.ranks) if fault.dies else set())
    try:
        while waited_for & set(running.values()) and time.monotonic() < limit:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in running:
                rank = running.pop(pid)
                codes[rank], ended[rank] = os.waitstatus_to_exitcode(status), time.monotonic()
            else:
                time.sleep(0.05)
    finally:
        for pid, rank in running.items():
            os.kill(pid, signal.SIGKILL)  # ends a stopped one too
            os.waitpid(pid, 0)
            ended[rank] = time.monotonic()
    strikes = [float(path.read_text()) for path in folder.glob("strike*")]
    began = min([*strikes, *ended.values()])
    ends = [
        RankEnd(
            codes.get(rank),
            seconds=max(ended[rank] - began, 0.0),
            output=(folder / f"rank{rank}.log").read_text(errors="replace"),
        )
        for rank in range(fault.num_ranks)
    ]
    return Outcome(ends, wrong=[what for rank in sorted(waited_for) for what in _wrong(ends[rank], rank, fault)])


def _wrong(end: RankEnd, rank: int, fault: Fault) -> list[str]:
    """Problems of a remaining rank."""
    if end.exit_code is None:
        return [f"rank {rank} hangs"]
    wrong = []
    if (end.exit_code == 0) != fault.goes_on:
        wrong.append(f"rank {rank} ended with {end.exit_code}")
    heard = fault.goes_on and rank != 0  # Megatron says on one rank why it ends
    if not heard and not re.search(fault.says, end.output):
        wrong.append(f"rank {rank} says: {end.last_word}")
    return wrong


def _start(fault: Fault, *, rank: int, port: int, folder: Path) -> int:
    struck = rank in fault.ranks
    balance = fault.balance if fault.flags_there is None or not struck else fault.flags_there

    def main() -> None:
        if struck and not fault.hooked:
            hooks.installation.undo()
        if struck and fault.strike != "none":
            from benchmarks.faults.strikes import STRIKES, Strike

            STRIKES[fault.strike](Strike(STEP, global_batch_size=GLOBAL_BATCH_SIZE, rank=rank, folder=folder))
        try:
            pretrain_sft.main()
        except BalanceError as error:
            raise SystemExit(f"megatron_balance: {error}") from None

    flags = f"{CPU_FLAGS} {MODEL_FLAGS} {TRAINING_FLAGS} {FLAGS} {fault.flags} {balance}"
    return fork_rank(
        main,
        arguments=["pretrain_sft", *flags.split()],
        environment=rank_environment(rank, num_ranks=fault.num_ranks, port=port),
        log=folder / f"rank{rank}.log",
    )
