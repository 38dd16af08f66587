"""Keeps the outcomes of runs in a file to which each run appends a line, so that an interrupted matrix can continue.

Invariant: a run that did not end well, or was not balanced although it was to be, is an outcome too, and says so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from training_run import Recorded

from benchmarks.equality.cases import NUM_STEPS, Case


@dataclass(frozen=True)
class Outcome:
    case: Case
    revision: str
    losses: Sequence[float] = ()
    grad_norms: Sequence[float] = ()
    cpu_seconds: float = 0.0
    seconds: float = 0.0
    error: str | None = None


@dataclass(frozen=True)
class Difference:
    loss: float
    grad_norm: float


def difference(outcome: Outcome, *, reference: Outcome) -> Difference:
    losses = _relative(outcome.losses, reference.losses)
    grad_norms = _relative(outcome.grad_norms, reference.grad_norms)
    return Difference(max(losses), max(grad_norms))


def _relative(values: Sequence[float], base: Sequence[float]) -> list[float]:
    return [abs(value - base_value) / abs(base_value) for value, base_value in zip(values, base, strict=True)]


def outcome_of(case: Case, recorded: Recorded, *, revision: str) -> Outcome:
    losses = [step["lm_loss"] for step in recorded.steps]
    grad_norms = [step["grad_norm"] for step in recorded.steps]
    with_plan = next((steps for steps in recorded.ranks if any("ranks" in step for step in steps)), [])
    error = None
    if len(losses) != NUM_STEPS or not all(math.isfinite(figure) for figure in (*losses, *grad_norms)):
        error = f"losses {losses}, gradient norms {grad_norms}: {NUM_STEPS} finite ones were expected"
    elif sum("ranks" in step for step in with_plan) != NUM_STEPS * case.is_balanced:
        error = f"{sum('ranks' in step for step in with_plan)} of {NUM_STEPS} steps were balanced"
    return Outcome(
        case,
        revision,
        losses=losses,
        grad_norms=grad_norms,
        cpu_seconds=round(recorded.cpu_seconds, 2),
        seconds=round(recorded.seconds, 2),
        error=error,
    )


class OutcomeFile:
    """Outcomes by case; the newest of a case counts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.is_file() else []
        self._outcomes = {outcome.case: outcome for outcome in map(_parse, lines)}

    @property
    def outcomes(self) -> Mapping[Case, Outcome]:
        return self._outcomes

    def is_done(self, case: Case) -> bool:
        """True if a run ended well; one that failed may be tried again."""
        return case in self._outcomes and self._outcomes[case].error is None

    def add(self, outcome: Outcome) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as out:
            out.write(json.dumps(asdict(outcome)) + "\n")
        self._outcomes[outcome.case] = outcome


def _parse(line: str) -> Outcome:
    fields: dict[str, Any] = json.loads(line)
    fields["case"] = Case(**fields["case"])
    return Outcome(**fields)
