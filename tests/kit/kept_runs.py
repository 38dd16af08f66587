"""Training runs that tests share: each is made once a session, and its records are read by every test that asks.

Workers of pytest-xdist share the folder: one makes a run, under a file lock, and the others wait for its records.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import forked
import numpy as np
from training_run import RunFailed, read_records
from watched_steps import STAND_INS

GRACE_SECONDS = 90.0
"""For the other ranks to end by themselves once one has failed, where a test asks for their errors."""


@dataclass(frozen=True)
class Run:
    """A run that has ended, the folder of its records and logs, and why it failed where it did."""

    folder: Path
    num_ranks: int
    problem: str | None = None

    @cached_property
    def rows(self):
        """Of each rank the lines of watched_steps.py."""
        return read_records(self.folder, num_ranks=self.num_ranks)

    def of_kind(self, kind):
        """Of each rank its lines of a kind."""
        return [[row for row in rows if row.get("kind", "step") == kind] for rows in self.rows]

    @property
    def steps(self):
        """Of a rank that knows the loss."""
        return next(steps for steps in self.of_kind("step") if steps and "lm_loss" in steps[0])

    def log(self, rank):
        """All that a rank printed."""
        return (self.folder / f"rank{rank}.log").read_text(errors="replace")

    def losses(self):
        """Of each evaluation, from the first rank that knows them."""
        return next(
            [row["losses"] for row in rows] for rows in self.of_kind("evaluation") if rows and rows[0]["losses"]
        )


class KeptRuns:
    """Makes runs and keeps them; in flags `{data}` is the folder of the data set and `{run}` that of the run."""

    def __init__(self, folder, *, data):
        self._folder = folder
        self.data = data

    def __call__(self, flags, *, num_ranks=2, stand_ins=(), environment=None, fails=False, **keywords):
        """The run with these flags, made now or before; `keywords` are those of `forked.train_forked`.

        A run that `fails` must, and all its ranks may end by themselves; RunFailed where it is otherwise.
        """
        flags = " ".join(flags.split())
        keywords = {
            "num_ranks": num_ranks,
            "grace_seconds": GRACE_SECONDS * fails,
            "module": "watched_steps",
        } | keywords
        keywords["environment"] = {**(environment or {}), STAND_INS: json.dumps(list(stand_ins))}
        named = json.dumps([flags, keywords], sort_keys=True)
        folder = self._folder / hashlib.sha256(named.encode()).hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True)
        outcome = folder / "outcome.json"
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not outcome.exists():
                words = flags.replace("{data}", str(self.data)).replace("{run}", str(folder)).split()
                problem = None
                try:
                    forked.train(folder, words, **keywords)
                except RunFailed as error:
                    problem = str(error)
                outcome.write_text(json.dumps({"problem": problem, "run": json.loads(named)}))
        problem = json.loads(outcome.read_text())["problem"]
        if (problem is not None) != fails:
            raise RunFailed(problem or f"it did not fail: {flags}")
        return Run(folder, num_ranks, problem)


def write_rows(path, first_tokens, *, longest, seed, few=0):
    """A jsonl file of random tokens, of which a third of each row is not learned.

    Most rows are far shorter than `longest`, and some as long; with `few`, all are as long or that many times shorter.
    """
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(4, 1.1, len(first_tokens)).astype(int), 8, longest)
    if few:
        lengths = np.where(lengths > np.median(lengths), longest, longest // few)
    with path.open("w") as out:
        for first, length in zip(first_tokens, lengths.tolist(), strict=True):
            tokens = [first, *rng.integers(1, 257, length).tolist()]  # the last is a label only; 0 pads
            learned = [0] * (length // 3) + [1] * (length + 1 - length // 3)
            out.write(json.dumps({"tokens": tokens, "loss_mask": learned}) + "\n")


def write_rollouts(path, *, seed, longest):
    """A jsonl file of rows that begin alike: two system prompts, prompts below them, and responses to these.

    Of each prompt two responses are equal, and one ends where another goes on, with another loss mask.
    """
    rng = np.random.default_rng(seed)

    def drawn(least, most):
        return rng.integers(1, 257, rng.integers(least, most)).tolist()

    with path.open("w") as out:
        for system in (drawn(20, 40), drawn(10, 20)):
            for _ in range(2):
                prompt = system + drawn(10, 60)
                first, second = drawn(3, 60), drawn(3, longest - len(prompt) - 30)
                for response in (first, second, second, drawn(3, 60), first + drawn(1, 30)):
                    masked = len(prompt) + (len(first) // 2 if response[: len(first)] == first != response else 0)
                    learned = [0] * masked + [1] * (len(prompt) + len(response) - masked)
                    out.write(json.dumps({"tokens": prompt + response, "loss_mask": learned}) + "\n")
