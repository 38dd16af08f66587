"""Judges the outcomes of runs: a balanced run against its reference.

A balanced run is right where every step was balanced, with dynamic sizes some micro-batch was shared by several ranks,
and its loss and gradient norm differ from the reference by rounding alone (tests/kit/training_run.py). The reference is
the stock run of the layout; where that fails, one rank.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from training_run import ALLOWANCES, Recorded, largest_difference

from benchmarks.sft.cases import LAYOUTS, NUM_STEPS, ONE_RANK, Case

_ERROR = re.compile(r"^(?:\[rank\d+\]: *)?((?:\w+\.)*\w*(?:Error|Exception)\b.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """Of one run."""

    recorded: Recorded | None = None
    error: str = ""


@dataclass(frozen=True)
class Verdict:
    """Of one balanced run; differences are the largest of any step, relative to the reference."""

    case: Case
    good: bool
    says: str
    reference: str = ""
    loss: float | None = None
    grad_norm: float | None = None


def last_error(output: str) -> str:
    """The last line that names an exception, or the last line."""
    found = _ERROR.findall(output)
    lines = output.strip().splitlines()
    return found[-1].strip() if found else lines[-1] if lines else "it printed nothing"


def judge_refusal(case: Case, *, ours: Outcome) -> Verdict:
    """True if a balanced run of a refused layout ended with an error of this package that names the flag."""
    flag = LAYOUTS[case.layout].refused
    if ours.recorded is None and "BalanceError: " in ours.error and flag in ours.error:
        return Verdict(case, True, f"refused, naming {flag}")
    return Verdict(case, False, f"not refused: {ours.error or 'it trained'}")


def judge(case: Case, *, ours: Outcome, stock: Outcome, one_rank: Outcome | None) -> Verdict:
    """Compare a balanced run with its reference."""
    if ours.recorded is None:
        return Verdict(case, False, f"fails: {ours.error}")
    reference, name = (stock.recorded, "stock")
    if reference is None:
        reference = None if one_rank is None else one_rank.recorded
        name = f"{ONE_RANK}; stock fails: {stock.error}"
    if reference is None:
        return Verdict(case, False, "there is no reference", reference=name)
    balanced = sum("ranks" in step for step in ours.recorded.ranks[0])
    if not len(ours.recorded.steps) == len(reference.steps) == balanced == NUM_STEPS:
        return Verdict(case, False, f"{balanced} of {NUM_STEPS} steps were balanced", reference=name)
    if case.dynamic and max(size for rank in ours.recorded.ranks for step in rank for size in step["cp_sizes"]) == 1:
        return Verdict(case, False, "no micro-batch was shared", reference=name)
    loss = largest_difference(ours.recorded, reference=reference, key="lm_loss")
    grad_norm = largest_difference(ours.recorded, reference=reference, key="grad_norm")
    allowed = ALLOWANCES["fp32"]
    equal = loss <= allowed.loss and grad_norm <= allowed.grad_norm
    return Verdict(
        case,
        equal,
        "equal" if equal else "differs",
        reference=name,
        loss=loss,
        grad_norm=grad_norm,
    )
