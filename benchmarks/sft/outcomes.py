"""Judges the outcomes of runs: a balanced run against its reference.

A balanced run is right where every step was balanced, with dynamic sizes some micro-batch was shared by several ranks,
and its loss, its gradient norm and every number that Megatron logs but the time differ from the reference by rounding
alone (tests/kit/training_run.py). The reference is the stock run of the layout; where that fails, one rank.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from decimal import Decimal

from training_run import ALLOWANCES, Recorded, largest_difference

from benchmarks.sft.cases import LAYOUTS, NUM_STEPS, ONE_RANK, Case

_ERROR = re.compile(r"^(?:\[rank\d+\]: *)?((?:\w+\.)*\w*(?:Error|Exception)\b.*)$", re.MULTILINE)


_STEP = re.compile(r"^.* iteration +(\d+/ +\d+ \|.*)$", re.MULTILINE)
_NUMBER = re.compile(r"([^|:]+): +(-?[\d.]+(?:E[-+]\d+)?) +(?=\|)")
_TIMED = "elapsed time per iteration (ms)"


@dataclass(frozen=True)
class Outcome:
    """Of one run; of each step the numbers that Megatron logged, as it wrote them."""

    recorded: Recorded | None = None
    error: str = ""
    logged: list[dict[str, str]] = field(default_factory=list)


def logged_numbers(output: str) -> list[dict[str, str]]:
    """Of each step in what a run printed, but for the time."""
    steps = [{name.strip(): number for name, number in _NUMBER.findall(line)} for line in _STEP.findall(output)]
    return [{name: number for name, number in step.items() if name != _TIMED} for step in steps]


def differing_number(ours: Outcome, reference: Outcome) -> str:
    """The first number that is logged otherwise, empty where none is: beyond rounding, and that of its last digit."""
    for step, (numbers, theirs) in enumerate(zip(ours.logged, reference.logged, strict=True), start=1):
        if numbers.keys() != theirs.keys():
            return f"step {step} logs {sorted(numbers.keys() ^ theirs.keys())} in one of them alone"
        for name, text in theirs.items():
            value, other = Decimal(numbers[name]), Decimal(text)
            digit = Decimal(1).scaleb(int(other.as_tuple().exponent))
            if abs(value - other) > digit + abs(other) * Decimal(ALLOWANCES["fp32"].loss):
                return f"step {step} logs {name} {value} in place of {other}"
    return ""


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
    errors = _ERROR.findall(output)
    lines = output.strip().splitlines()
    return errors[-1].strip() if errors else lines[-1] if lines else "it printed nothing"


def judge_refusal(case: Case, *, ours: Outcome) -> Verdict:
    """True if a balanced run of a refused layout ended with an error of this package that names the flag."""
    flag = LAYOUTS[case.layout].refused
    if ours.recorded is None and "BalanceError: " in ours.error and flag in ours.error:
        return Verdict(case, True, f"refused, naming {flag}")
    return Verdict(case, False, f"not refused: {ours.error or 'it trained'}")


def judge(case: Case, *, ours: Outcome, stock: Outcome, one_rank: Outcome | None) -> Verdict:
    if ours.recorded is None:
        return Verdict(case, False, f"fails: {ours.error}")
    judged_by, name = stock, "stock"
    if stock.recorded is None:
        judged_by, name = one_rank or stock, f"{ONE_RANK}; stock fails: {stock.error}"
    reference = judged_by.recorded
    if reference is None:
        return Verdict(case, False, "there is no reference", reference=name)
    balanced = sum("ranks" in step for step in ours.recorded.ranks[0])
    if not len(ours.recorded.steps) == len(reference.steps) == balanced == NUM_STEPS:
        return Verdict(case, False, f"{balanced} of {NUM_STEPS} steps were balanced", reference=name)
    if not len(ours.logged) == len(judged_by.logged) == NUM_STEPS:
        return Verdict(case, False, f"{len(ours.logged)} of {NUM_STEPS} steps are in the log", reference=name)
    if case.dynamic and max(size for rank in ours.recorded.ranks for step in rank for size in step["cp_sizes"]) == 1:
        return Verdict(case, False, "no micro-batch was shared", reference=name)
    loss = largest_difference(ours.recorded, reference=reference, key="lm_loss")
    grad_norm = largest_difference(ours.recorded, reference=reference, key="grad_norm")
    allowed = ALLOWANCES["fp32"]
    equal = loss <= allowed.loss and grad_norm <= allowed.grad_norm
    says = (differing_number(ours, judged_by) or "equal") if equal else "differs"
    return Verdict(
        case,
        says == "equal",
        says,
        reference=name,
        loss=loss,
        grad_norm=grad_norm,
    )
