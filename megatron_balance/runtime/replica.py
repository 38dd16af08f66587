"""Gives all ranks of one model replica the same plan, or the same error.

The *firsts* are the first ranks of the replica's tensor-parallel groups: one for every pipeline stage and
context-parallel rank. Those that load data plan, each with its own data-parallel group. They meet with the replica's
first rank, and each passes the outcome on within its tensor-parallel group.

    share    firsts → replica's first: one gather of 6 int64     first → firsts → tensor groups: one broadcast of 1 KiB
    decide   first → firsts without data → tensor groups: one broadcast of one int64, and none where all ranks load

A second broadcast carries what is over INLINE_NUMBERS; texts of errors need one all_gather more.

Invariant: ranks call `share` and `decide` in one order; only one thread is in either at a time.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError
from megatron_balance.runtime.collectives import all_gather_bytes, broadcast_row, gather_row, ranks_where
from megatron_balance.runtime.gather import OutOfStepError

KIND, NUM_NUMBERS, DIGEST, STEP, NEW_SOURCE, NUM_BYTES = range(6)
LISTENS, PLANNED, FAILED, LOST = range(4)
"""Kinds of ranks."""

OUTCOME_FIELDS = 3
INLINE_NUMBERS = 124
"""Sent with the outcome in its one KiB."""


ANOTHER_ITERATOR = (
    "Ranks of a model replica make different steps of this run: to some of them came another iterator than the one "
    "that their next step was prepared from, and not to all. Pass a new iterator on every rank or on none, or set "
    "--no-balance-overlap."
)


class ReplicaError(OutOfStepError):
    """A rank of this model replica cannot make the step, and trying again at its beginning would not help."""


class Choice(enum.IntEnum):
    """Source of the data of a step that begins."""

    PREPARED = 0
    LAST = 1
    """The step runs again."""
    MADE_NOW = 2
    NONE = 3
    """Ranks of the replica differ."""


class _Status(enum.IntEnum):
    AGREED = 0
    FAILED = 1
    LOST = 2
    FAILED_ELSEWHERE = 3
    """The text of the error is on the ranks whose sizes follow."""
    LOST_ELSEWHERE = 4


@dataclass(frozen=True)
class Share:
    """One rank's part of a step's agreement.

    Attributes:
        step: counted by the caller; equal on all ranks.
        numbers: what it planned; None where it loads no data, or has a problem.
        digest: of everything else that must be equal, in [0, 2**63).
        new_source: whether the data comes from another source than that of the last step.
        problem: error of this rank, raised on every rank of the replica; None without one.
        lost: the step cannot be made again either.
    """

    step: int
    numbers: list[int] | None = None
    digest: int = 0
    new_source: bool = False
    problem: str | None = None
    lost: bool = False

    def row(self) -> NDArray[np.int64]:
        """int64 `[6]`."""
        kind, numbers = LISTENS, self.numbers or []
        if self.problem is not None:
            kind = LOST if self.lost else FAILED
        elif self.numbers is not None:
            kind = PLANNED
        row = [kind, len(numbers), self.digest, self.step, self.new_source, len(self.text)]
        return np.array(row, dtype=np.int64)

    @property
    def text(self) -> bytes:
        """The problem's."""
        return b"" if self.problem is None else self.problem.encode()


@dataclass(frozen=True)
class Shared:
    """A step as all ranks of the replica agreed on it.

    Attributes:
        numbers: planned by the replica's first rank.
        new_source: whether some rank's data comes from another source than that of the last step.
    """

    numbers: list[int]
    new_source: bool


@dataclass(frozen=True)
class _Outcome:
    """The message that ranks pass on: numbers, the bytes of an error's text, or the sizes of several."""

    status: _Status
    numbers: list[int]
    new_source: bool = False

    @classmethod
    def of_error(cls, text: str, *, lost: bool) -> _Outcome:
        return cls(_Status.LOST if lost else _Status.FAILED, list(text.encode()))

    def shared(self) -> Shared:
        if self.status == _Status.AGREED:
            return Shared(self.numbers, self.new_source)
        text = bytes(self.numbers).decode()
        raise ReplicaError(text) if self.status == _Status.LOST else BalanceError(text)


class Replica:
    """The ranks of one model replica, as one of them sees them.

    Args:
        firsts: the first ranks of its tensor-parallel groups, if there are several and this is one; gloo.
        tensor: this rank's tensor-parallel group, if it has several ranks; gloo.
        some_firsts_listen: some of the firsts load no data. The first of all does.

    Attributes:
        firsts: as given.
        tensor: as given.
    """

    def __init__(
        self,
        *,
        firsts: dist.ProcessGroup | None = None,
        tensor: dist.ProcessGroup | None = None,
        some_firsts_listen: bool = False,
    ) -> None:
        self.firsts = firsts
        self.tensor = tensor
        self._some_firsts_listen = some_firsts_listen and firsts is not None

    @property
    def _is_first(self) -> bool:
        return self.tensor is None or self.tensor.rank() == 0

    def share(self, own: Share) -> Shared:
        """Agree on a step with the ranks of the replica.

        Args:
            own: of this rank.

        Raises:
            BalanceError: on every rank: a problem on one of them, or different plans.
            ReplicaError: on every rank: a problem that making the step again does not solve, or different steps.
        """
        outcome = self._meet(own) if self._is_first else None
        return _passed_on(outcome, group=self.tensor).shared()

    def _meet(self, own: Share) -> _Outcome:
        group = self.firsts
        if group is None:
            if own.problem is not None:
                return _Outcome.of_error(own.problem, lost=own.lost)
            assert own.numbers is not None, "the first rank of a replica loads data"
            return _Outcome(_Status.AGREED, own.numbers, own.new_source)
        rows = gather_row(own.row(), group=group, what="the plans of this model replica (compare)")
        outcome = _passed_on(None if rows is None else _judged(rows, first=own, group=group), group=group)
        if outcome.status in (_Status.FAILED_ELSEWHERE, _Status.LOST_ELSEWHERE):
            sizes = np.array(outcome.numbers, dtype=np.int64)
            texts = all_gather_bytes(own.text, nbytes=sizes, group=group, what="the errors of this model replica")
            text = " | ".join(dict.fromkeys(text.decode() for text in texts if text))
            return _Outcome.of_error(text, lost=outcome.status == _Status.LOST_ELSEWHERE)
        agreed = outcome.status == _Status.AGREED
        return replace(outcome, numbers=own.numbers) if agreed and own.numbers is not None else outcome

    def decide(self, own: Choice | None) -> Choice:
        """Source of the data of the step that begins, as a rank that loads data has chosen it.

        Without ranks that load none nothing is sent. No rank waits for any but those that pass it the choice, and then
        the activations or the tensors of the step.

        Args:
            own: this rank's choice; None where it loads no data.

        Raises:
            ReplicaError: on every rank, at once or when its next step is prepared: the replica's first rank chose data
                that another has not.
        """
        choice = own
        if self._some_firsts_listen and self.firsts is not None:
            choice = _sent(own, group=self.firsts)
            if own not in (None, choice) and choice != Choice.MADE_NOW:
                choice = Choice.NONE
        if self.tensor is not None:
            choice = _sent(choice, group=self.tensor)
        assert choice is not None, "the first rank of a replica loads data"
        if choice == Choice.NONE:
            self.share(Share(-1, problem=ANOTHER_ITERATOR, lost=True))  # raises, also where ranks prepare the next step
        return choice


def _sent(choice: Choice | None, *, group: dist.ProcessGroup) -> Choice:
    row = np.array([choice or 0], dtype=np.int64)
    what = "where this model replica's data of the step comes from (broadcast)"
    return Choice(int(broadcast_row(row, group=group, what=what)[0]))


def _judged(rows: NDArray[np.int64], *, first: Share, group: dist.ProcessGroup) -> _Outcome:
    """The outcome from the rows of all firsts `[num_firsts, 6]`, on the first of them."""
    kinds, steps = rows[:, KIND], rows[:, STEP]
    failed, lost = kinds >= FAILED, kinds == LOST
    if failed.any():
        status = _Status.LOST_ELSEWHERE if lost.any() else _Status.FAILED_ELSEWHERE
        return _Outcome(status, rows[:, NUM_BYTES].tolist())
    if (steps != steps[0]).any():
        return _Outcome.of_error(ANOTHER_ITERATOR, lost=True)
    planned = kinds == PLANNED
    differ = planned & (rows[:, [NUM_NUMBERS, DIGEST]] != rows[0, [NUM_NUMBERS, DIGEST]]).any(axis=1)
    if differ.any():
        text = (
            "the data of this step differs within a model replica: in the data-parallel group of "
            f"{ranks_where(differ, group=group)} other samples were read than in that of "
            f"rank {dist.get_global_rank(group, 0)}. "
            "Every pipeline stage and context-parallel rank must read the same data, in one order."
        )
        return _Outcome.of_error(text, lost=False)
    assert first.numbers is not None, "the first rank of a replica loads data"
    numbers = [] if planned.all() else first.numbers
    return _Outcome(_Status.AGREED, numbers, bool(rows[:, NEW_SOURCE].any()))


def _passed_on(outcome: _Outcome | None, *, group: dist.ProcessGroup | None) -> _Outcome:
    """The outcome of the group's first rank on all of them."""
    if group is None:
        assert outcome is not None, "this rank is the only one"
        return outcome
    row = np.zeros(OUTCOME_FIELDS + INLINE_NUMBERS, dtype=np.int64)
    if outcome is not None:
        row[:OUTCOME_FIELDS] = outcome.status, outcome.new_source, len(outcome.numbers)
        inline = outcome.numbers[:INLINE_NUMBERS]
        row[OUTCOME_FIELDS : OUTCOME_FIELDS + len(inline)] = inline
    what = "the plan from the first rank of this model replica (broadcast)"
    row = broadcast_row(row, group=group, what=what)
    status, new_source, num_numbers = row[:OUTCOME_FIELDS].tolist()
    numbers: list[int] = row[OUTCOME_FIELDS:][:num_numbers].tolist()
    num_more = num_numbers - INLINE_NUMBERS
    if num_more > 0:
        more = np.zeros(num_more, dtype=np.int64)
        if outcome is not None:
            more[:] = outcome.numbers[INLINE_NUMBERS:]
        numbers += broadcast_row(more, group=group, what=what).tolist()
    return _Outcome(_Status(status), numbers, bool(new_source))
