"""Kills a run with SIGKILL in the middle of a step, and resumes it from its newest checkpoint."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from forked import train_forked
from training_run import ALLOWANCES, RunFailed

from benchmarks.equality.cases import NUM_STEPS
from benchmarks.resume.cases import SAVE_INTERVAL, Case

TIMEOUT_SECONDS = 900
LONGEST_WAIT_SECONDS = 0.05
"""After a step was recorded; about a step of this model."""

ROUNDING = ALLOWANCES["fp32"].loss
"""Relative, of loss and gradient norm."""


@dataclass(frozen=True)
class Outcome:
    killed_after: int
    victims: str
    resumed_at: int
    num_equal: int
    num_compared: int
    largest_difference: float
    problem: str


class Killer:
    """Sends SIGKILL a moment after a number of steps was recorded."""

    def __init__(self, record: Path, *, num_ranks: int, rng: np.random.Generator) -> None:
        self._record = record / "rank0.jsonl"
        self.num_steps = int(rng.integers(SAVE_INTERVAL + 1, NUM_STEPS))
        self.victim = None if rng.random() < 0.5 else int(rng.integers(num_ranks))
        self._wait_seconds = float(rng.random()) * LONGEST_WAIT_SECONDS
        self.has_killed = False

    @property
    def victims(self) -> str:
        return "all ranks" if self.victim is None else f"rank {self.victim}"

    def __call__(self, ranks: Mapping[int, int]) -> None:
        """Look, and kill; for `train_forked`, which ends the ranks that are left."""
        if self.has_killed or not self._record.exists():
            return
        if len(self._record.read_bytes().splitlines()) < self.num_steps:
            return
        time.sleep(self._wait_seconds)
        for pid, rank in ranks.items():
            if self.victim in (None, rank):
                os.kill(pid, signal.SIGKILL)
        self.has_killed = True


def steps_of(folder: Path, *, flags: str, num_ranks: int) -> list[dict[str, Any]]:
    """Train, and read what rank 0 recorded."""
    arguments = flags.split()
    return train_forked(
        folder, arguments, num_ranks=num_ranks, timeout_seconds=TIMEOUT_SECONDS, grace_seconds=0.0
    ).steps


def newest_checkpoint(folder: Path) -> int:
    return int((folder / "latest_checkpointed_iteration.txt").read_text())


def kill_and_resume(
    case: Case, *, whole: list[dict[str, Any]], folder: Path, data: str, rng: np.random.Generator
) -> Outcome:
    checkpoints = folder / "checkpoints"
    flags = f"{case.flags} {data} --save {checkpoints} --save-interval {SAVE_INTERVAL}"
    killer = Killer(folder / "killed", num_ranks=case.ranks, rng=rng)
    try:
        steps_of_killed(folder / "killed", flags=flags, case=case, killer=killer)
    except RunFailed as error:
        if not killer.has_killed:
            return Outcome(killer.num_steps, killer.victims, 0, 0, 0, 0.0, f"failed before it was killed: {error}")
    else:
        return Outcome(killer.num_steps, killer.victims, 0, 0, 0, 0.0, "ended before it was killed")
    start = newest_checkpoint(checkpoints)
    try:
        resumed = steps_of(folder / "resumed", flags=f"{flags} --load {checkpoints}", num_ranks=case.ranks_after)
    except RunFailed as error:
        return Outcome(killer.num_steps, killer.victims, start, 0, 0, 0.0, f"did not resume: {error}")
    outcome = compare(resumed, whole=whole, start=start, bit_for_bit=case.ranks == case.ranks_after)
    return replace(outcome, killed_after=killer.num_steps, victims=killer.victims)


def steps_of_killed(folder: Path, *, flags: str, case: Case, killer: Killer) -> None:
    """Train until the killer strikes, which raises RunFailed."""
    train_forked(folder, flags.split(), num_ranks=case.ranks, timeout_seconds=TIMEOUT_SECONDS, watch=killer)


def compare(resumed: list[dict[str, Any]], *, whole: list[dict[str, Any]], start: int, bit_for_bit: bool) -> Outcome:
    """Hold a resumed run against one that was not interrupted."""
    expected = whole[start:]
    pairs = list(zip(resumed, expected, strict=False))
    equal = [all(step[key] == base[key] for key in ("lm_loss", "grad_norm")) for step, base in pairs]
    difference = max(
        (abs(step[key] - base[key]) / abs(base[key]) for step, base in pairs for key in ("lm_loss", "grad_norm")),
        default=0.0,
    )
    problem = ""
    if len(resumed) != len(expected):
        problem = f"{len(resumed)} steps in place of {len(expected)}"
    elif any(sorted(step["lengths"]) != sorted(base["lengths"]) for step, base in pairs):
        problem = "other samples in a step"
    elif difference > (0.0 if bit_for_bit else ROUNDING):
        problem = f"differs by {difference:.1e}"
    num_equal = equal.index(False) if False in equal else len(equal)
    return Outcome(0, "", start, num_equal, len(expected), difference, problem)
