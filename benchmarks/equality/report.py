"""What the runs show, for people and for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.equality.cases import Case
from benchmarks.equality.outcomes import Outcome, difference


class Report:
    """On the runs that were wanted.

    Args:
        wanted: cases, each after the one it is compared with.
        outcomes: what was run.
    """

    def __init__(self, wanted: Sequence[Case], outcomes: Mapping[Case, Outcome]) -> None:
        self._wanted = wanted
        self._outcomes = outcomes

    @property
    def is_good(self) -> bool:
        """Whether every run that was wanted ended well."""
        return all(case in self._outcomes and self._outcomes[case].error is None for case in self._wanted)

    def summary(self) -> str:
        """A line a run."""
        return "".join(f"{case.name}: {self._says(case)}\n" for case in self._wanted)

    def _says(self, case: Case) -> str:
        outcome, reference = self._outcomes.get(case), self._outcomes.get(case.reference)
        if outcome is None or reference is None:
            return "not run"
        if outcome.error is not None or reference.error is not None:
            return f"failed: {outcome.error or reference.error}"
        far = difference(outcome, reference=reference)
        return f"loss {far.loss:.1e}, gradient norm {far.grad_norm:.1e}"
