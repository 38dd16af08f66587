"""Reports the equality matrix: a summary on the screen, a page of tables, and a table of every run.

A balanced run equals stock where loss and gradient norm of every step differ from it by at most what the number format
allows (rounding.py), or SPREAD times what another order or grouping of the same rows changes in stock runs, at
its largest over all cells of that precision, where that is more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from rounding import ALLOWANCES, Allowance

from benchmarks.equality.cases import (
    AS_CHOSEN,
    AUX_LAYOUTS,
    GLOBAL_BATCH_SIZE,
    LAYOUTS,
    NUM_STEPS,
    POLICIES,
    PRECISIONS,
    SEQ_LENGTH,
    TORCHRUN,
    YARDSTICKS,
    Case,
)
from benchmarks.equality.outcomes import Difference, Outcome, difference
from benchmarks.equality.page import PAGE
from benchmarks.markdown import table
from megatron_balance.runtime.environment import environment

SPREAD = 3
"""Two samples of one spread, the largest of eight steps each, differ by less."""

NOT_RUN = "not run"

BACKENDS = {"cpu": "gloo", "cuda": "NCCL"}


@dataclass(frozen=True)
class Compared:
    """A run and its difference from its reference.

    Attributes:
        case: the run.
        difference: None where the run or its reference failed or has not been run.
        problem: why it is None, or that it differs by too much; None where all is well.
    """

    case: Case
    difference: Difference | None
    problem: str | None = None


class Report:
    """On the runs that were wanted.

    Args:
        wanted: cases, each after the one it is compared with.
        outcomes: what was run; all stock runs in it are yardsticks.
        device: of the ranks, `cpu` or `cuda`.
    """

    def __init__(self, wanted: Sequence[Case], outcomes: Mapping[Case, Outcome], *, device: str = "cpu") -> None:
        self._outcomes = outcomes
        self._device = device
        far = [self._compare(case) for case in wanted]
        known = [self._compare(case) for case in outcomes]
        self._yardsticks = {precision: _largest(_yardsticks(known, precision)) for precision in PRECISIONS}
        self.compared = [self._judge(one) for one in far]

    @property
    def is_good(self) -> bool:
        """True if every run that was wanted ended well and equals stock."""
        return all(one.problem is None for one in self.compared)

    def summary(self) -> str:
        """The number of runs, and their problems."""
        problems = [one for one in self.compared if one.problem not in (None, NOT_RUN)]
        lines = [f"{one.case.name}: {one.problem}" for one in problems]
        return "\n".join([*lines, self._count(), ""])

    def every_run(self) -> str:
        """A table with a row a run, as Markdown."""
        rows = [(one.case.name.replace(" / ", " | "), *_cells(one), self._cost(one.case)) for one in self._of(bool)]
        head = (
            "layout | precision | optimizer | run | loss | gradient norm | loss, step 1 | gradient norm, step 1 | CPU s"
        )
        return f"""# Equality, run by run

Made by `scripts/equality_matrix.sh --publish`; do not edit. What it means: docs/equality.md.

{self._count()} {self._where()}

{_table(head, rows)}"""

    def page(self) -> str:
        """The page of the documentation."""
        return PAGE.format(
            count=self._count(),
            where=self._where(),
            num_steps=NUM_STEPS,
            global_batch_size=GLOBAL_BATCH_SIZE,
            seq_length=SEQ_LENGTH,
            spread=SPREAD,
            allowed=_of_precisions(ALLOWANCES),
            yardsticks=_of_precisions(self._yardsticks),
            first=self._first(),
            layouts=self._by_layout(),
            policies=self._by_policy(),
            aux=self._aux(),
            other_rows=self._other_rows(),
            forked=self._forked(),
        )

    def json(self) -> str:
        """Every figure, a run a line."""
        runs = [
            json.dumps(asdict(one) | {"outcome": {**asdict(self._outcomes[one.case]), "case": None, "taken": None}})
            for one in self.compared
            if one.case in self._outcomes
        ]
        result: dict[str, Any] = {"environment": environment(self._device), "spread": SPREAD}
        result |= {"largest_of_stock": {name: limit and asdict(limit) for name, limit in self._yardsticks.items()}}
        head = json.dumps(result, indent=1).removesuffix("\n}")
        return f'{head},\n "runs": [\n  ' + ",\n  ".join(runs) + "\n ]\n}\n"

    def _compare(self, case: Case) -> Compared:
        outcome, reference = self._outcomes.get(case), self._outcomes.get(case.reference)
        if outcome is None:
            return Compared(case, None, NOT_RUN)
        if outcome.error is not None:
            return Compared(case, None, f"failed: {outcome.error}")
        if reference is None or reference.error is not None:
            return Compared(case, None, f"{case.reference.name} failed or was not run")
        return Compared(case, difference(outcome, reference=reference))

    def _judge(self, one: Compared) -> Compared:
        far, yardstick = one.difference, self._yardsticks[one.case.precision]
        if far is None or not one.case.is_balanced or one.case.layout in AUX_LAYOUTS:
            return one
        if one.case.way == TORCHRUN:
            limit = Allowance(0, 0)
        elif yardstick is None:
            return Compared(one.case, far, "no other stock run to judge it by")
        else:
            limit = _limit(one.case.precision, yardstick=yardstick)
        if far.loss <= limit.loss and far.grad_norm <= limit.grad_norm:
            return one
        return Compared(one.case, far, f"differs: loss {far.loss:.1e}, gradient norm {far.grad_norm:.1e}")

    def _of(self, wanted: Callable[[Case], bool]) -> list[Compared]:
        return [one for one in self.compared if wanted(one.case) and one.problem != NOT_RUN]

    def _count(self) -> str:
        run = [one for one in self.compared if one.problem != NOT_RUN]
        failed = sum(one.difference is None for one in run)
        differ = sum(one.problem is not None for one in run) - failed
        missing = len(self.compared) - len(run)
        not_yet = f" {missing} more are part of the command and not run yet." if missing else ""
        return f"{len(run)} runs: {failed} failed, {differ} differ by more than rounding.{not_yet}"

    def _where(self) -> str:
        hardware = environment(self._device)
        versions = ", ".join(f"{name} {version}" for name, version in hardware["versions"].items())
        revisions = sorted({outcome.revision for outcome in self._outcomes.values()})
        return f"{hardware['device']}, {BACKENDS[self._device]}; {versions}; revision {', '.join(revisions)}."

    def _cost(self, case: Case) -> str:
        return f"{self._outcomes[case].cpu_seconds:.1f}" if case in self._outcomes else ""

    def _by_layout(self) -> str:
        rows = []
        for cell in dict.fromkeys(one.case.cell for one in self.compared if one.case.layout in LAYOUTS):
            ours = self._of(lambda case, cell=cell: case.cell == cell and case.way in POLICIES)
            if ours:
                stock = self._of(lambda case, cell=cell: case.cell == cell and case.way in YARDSTICKS)
                rows.append((*cell, *_summed(ours), *_summed(stock)[1:]))
        rows.sort(key=lambda row: list(LAYOUTS).index(row[0]))
        head = "ranks | precision | optimizer | policies | loss | gradient norm | stock: loss | stock: gradient norm"
        return _table(head, rows)

    def _by_policy(self) -> str:
        rows = []
        for policy in POLICIES:
            for precision in PRECISIONS:
                ours = self._of(lambda case, key=(policy, precision): _is_of(case, *key))
                if ours:
                    rows.append((policy, precision, *_summed(ours), f"`{POLICIES[policy]}`"))
        return _table("policy | precision | runs | loss | gradient norm | flags", rows)

    def _aux(self) -> str:
        ours = self._of(lambda case: case.layout in AUX_LAYOUTS and case.reference != case)
        rows = [(f"`{one.case.layout}`", one.case.way, *_cells(one)) for one in ours]
        return _table("auxiliary loss | run | loss | gradient norm | loss, step 1 | gradient norm, step 1", rows)

    def _first(self) -> str:
        largest = {
            precision: _largest(self._of(lambda case, key=precision: any(_is_of(case, way, key) for way in POLICIES)))
            for precision in PRECISIONS
        }
        of_first = {
            name: far and Difference(far.first_loss, far.first_grad_norm, 0, 0) for name, far in largest.items()
        }
        return _of_precisions(of_first)

    def _other_rows(self) -> str:
        far = [self._compare(case).difference for case in self._outcomes if case.way == AS_CHOSEN]
        seen = [one for one in far if one is not None]
        if not seen:
            return NOT_RUN
        return f"loss {min(one.loss for one in seen):.1e}, gradient norm {min(one.grad_norm for one in seen):.1e}"

    def _forked(self) -> str:
        ours = self._of(lambda case: case.way == TORCHRUN)
        return _table("run | loss | gradient norm", [(one.case.name, *_cells(one)[:2]) for one in ours])


def _is_of(case: Case, policy: str, precision: str) -> bool:
    return case.layout in LAYOUTS and case.way == policy and case.precision == precision


def _yardsticks(far: Iterable[Compared], precision: str) -> list[Compared]:
    return [one for one in far if any(_is_of(one.case, way, precision) for way in YARDSTICKS)]


def _limit(precision: str, *, yardstick: Difference) -> Allowance:
    allowed = ALLOWANCES[precision]
    return Allowance(max(allowed.loss, SPREAD * yardstick.loss), max(allowed.grad_norm, SPREAD * yardstick.grad_norm))


def _of_precisions(largest: Mapping[str, Difference | Allowance | None]) -> str:
    seen = {name: far for name, far in largest.items() if far is not None}
    return "; ".join(f"{name}, loss {far.loss:.1e}, gradient norm {far.grad_norm:.1e}" for name, far in seen.items())


def _largest(far: Iterable[Compared]) -> Difference | None:
    """Of each figure."""
    seen = [one.difference for one in far if one.difference is not None]
    if not seen:
        return None
    return Difference(**{field.name: max(getattr(one, field.name) for one in seen) for field in fields(Difference)})


def _summed(ours: Sequence[Compared]) -> tuple[str, str, str]:
    """Count and largest differences, marked where a run failed."""
    bad = [one for one in ours if one.problem is not None]
    largest = _largest(ours)
    count = f"{len(ours)}" + (f", **{len(bad)} not equal**" if bad else "")
    if largest is None:
        return count, "", ""
    return count, f"{largest.loss:.1e}", f"{largest.grad_norm:.1e}"


def _cells(one: Compared) -> tuple[str, ...]:
    if one.difference is None:
        return (one.problem or "").splitlines()[0][:60], "", "", ""
    return tuple(f"{figure:.1e}" for figure in asdict(one.difference).values())


def _table(head: str, rows: Iterable[Sequence[str]]) -> str:
    return table(head, rows, align="l" * len(head.split(" | "))) + "\n"
