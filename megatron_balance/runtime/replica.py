"""Gives all ranks of one model replica the same step, or the same error, as the step begins.

The *firsts* are the first ranks of the replica's tensor-parallel groups: one for every pipeline stage and
context-parallel rank. Those that load data have made the step, each with its own data-parallel group. They meet with
the replica's first rank, and each passes the outcome on within its tensor-parallel group.

    firsts → replica's first: one gather of 4 int64     first → firsts → tensor groups: one broadcast of 1 KiB

A second broadcast carries what is over INLINE_NUMBERS; texts of errors need one all_gather more.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError
from megatron_balance.runtime.collectives import all_gather_bytes, broadcast_row, gather_row, ranks_where

KIND, NUM_NUMBERS, DIGEST, NUM_BYTES = range(4)
LISTENS, PLANNED, FAILED = range(3)
"""Kinds of ranks."""

OUTCOME_FIELDS = 2
INLINE_NUMBERS = 126
"""Sent with the outcome in its one KiB."""


class _Status(enum.IntEnum):
    AGREED = 0
    FAILED = 1
    FAILED_ELSEWHERE = 2
    """The text of the error is on the ranks whose sizes follow."""


@dataclass(frozen=True)
class Share:
    """One rank's part of a step's agreement.

    Attributes:
        numbers: what it planned; None where it loads no data, or has a problem.
        digest: of everything else that must be equal, in [0, 2**63).
        problem: error of this rank, raised on every rank of the replica; None without one.
    """

    numbers: list[int] | None = None
    digest: int = 0
    problem: str | None = None

    def row(self) -> NDArray[np.int64]:
        """int64 `[4]`."""
        kind = FAILED if self.problem is not None else LISTENS if self.numbers is None else PLANNED
        return np.array([kind, len(self.numbers or []), self.digest, len(self.text)], dtype=np.int64)

    @property
    def text(self) -> bytes:
        """The problem's."""
        return b"" if self.problem is None else self.problem.encode()


@dataclass(frozen=True)
class _Outcome:
    """The message that ranks pass on: numbers, the bytes of an error's text, or the sizes of several."""

    status: _Status
    numbers: list[int]

    @classmethod
    def of_error(cls, text: str) -> _Outcome:
        return cls(_Status.FAILED, list(text.encode()))


@dataclass(frozen=True)
class Replica:
    """The ranks of one model replica, as one of them sees them.

    Attributes:
        firsts: the first ranks of its tensor-parallel groups, if there are several and this is one; gloo. The first of
            them loads data.
        tensor: this rank's tensor-parallel group, if it has several ranks; gloo.
    """

    firsts: dist.ProcessGroup | None = None
    tensor: dist.ProcessGroup | None = None

    def share(self, own: Share) -> list[int]:
        """Agree on a step; all ranks of the replica call it.

        Args:
            own: of this rank.

        Returns:
            The numbers of this rank; where it loads no data, those of the first that does.

        Raises:
            BalanceError: on every rank: a problem on one of them, or different plans.
        """
        outcome = None
        if self.tensor is None or self.tensor.rank() == 0:
            outcome = self._meet(own)
        outcome = _passed_on(outcome, group=self.tensor)
        if outcome.status != _Status.AGREED:
            raise BalanceError(bytes(outcome.numbers).decode())
        return outcome.numbers

    def _meet(self, own: Share) -> _Outcome:
        group = self.firsts
        if group is None:
            if own.problem is not None:
                return _Outcome.of_error(own.problem)
            assert own.numbers is not None, "the first rank of a replica loads data"
            return _Outcome(_Status.AGREED, own.numbers)
        rows = gather_row(own.row(), group=group, what="the plans of this model replica (compare)")
        outcome = _passed_on(None if rows is None else _judged(rows, first=own, group=group), group=group)
        if outcome.status == _Status.FAILED_ELSEWHERE:
            sizes = np.array(outcome.numbers, dtype=np.int64)
            texts = all_gather_bytes(own.text, nbytes=sizes, group=group, what="the errors of this model replica")
            return _Outcome.of_error(" | ".join(dict.fromkeys(text.decode() for text in texts if text)))
        agreed = outcome.status == _Status.AGREED
        return replace(outcome, numbers=own.numbers) if agreed and own.numbers is not None else outcome


def _judged(rows: NDArray[np.int64], *, first: Share, group: dist.ProcessGroup) -> _Outcome:
    """The outcome from the rows of all firsts `[num_firsts, 4]`, on the first of them."""
    kinds = rows[:, KIND]
    if (kinds == FAILED).any():
        return _Outcome(_Status.FAILED_ELSEWHERE, rows[:, NUM_BYTES].tolist())
    planned = kinds == PLANNED
    differ = planned & (rows[:, [NUM_NUMBERS, DIGEST]] != rows[0, [NUM_NUMBERS, DIGEST]]).any(axis=1)
    if differ.any():
        return _Outcome.of_error(
            "the data of this step differs within a model replica: in the data-parallel group of "
            f"{ranks_where(differ, group=group)} other samples were read than in that of "
            f"rank {dist.get_global_rank(group, 0)}. "
            "Every pipeline stage and context-parallel rank must read the same data, in one order."
        )
    assert first.numbers is not None, "the first rank of a replica loads data"
    return _Outcome(_Status.AGREED, [] if planned.all() else first.numbers)


def _passed_on(outcome: _Outcome | None, *, group: dist.ProcessGroup | None) -> _Outcome:
    """The outcome of the group's first rank on all of them."""
    if group is None:
        assert outcome is not None, "this rank is the only one"
        return outcome
    row = np.zeros(OUTCOME_FIELDS + INLINE_NUMBERS, dtype=np.int64)
    if outcome is not None:
        inline = outcome.numbers[:INLINE_NUMBERS]
        row[:OUTCOME_FIELDS] = outcome.status, len(outcome.numbers)
        row[OUTCOME_FIELDS : OUTCOME_FIELDS + len(inline)] = inline
    what = "the plan from the first rank of this model replica (broadcast)"
    row = broadcast_row(row, group=group, what=what)
    status, num_numbers = row[:OUTCOME_FIELDS].tolist()
    numbers: list[int] = row[OUTCOME_FIELDS:][:num_numbers].tolist()
    num_more = num_numbers - INLINE_NUMBERS
    if num_more > 0:
        more = np.zeros(num_more, dtype=np.int64)
        if outcome is not None:
            more[:] = outcome.numbers[INLINE_NUMBERS:]
        numbers += broadcast_row(more, group=group, what=what).tolist()
    return _Outcome(_Status(status), numbers)
