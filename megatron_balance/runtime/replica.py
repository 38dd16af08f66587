"""Gives all ranks of one model replica the same step, or the same error, as the step begins.

The *firsts* are the first ranks of the replica's tensor-parallel groups: one for every pipeline stage and
context-parallel rank. Those that load data have made the step, each with its own data-parallel group. They agree, the
first of them sends the step's numbers to those that load none, and each passes the outcome on within its
tensor-parallel group: one broadcast of 1 KiB, and a second one of what is over INLINE_NUMBERS.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch.distributed as dist

from megatron_balance.errors import BalanceError
from megatron_balance.runtime.comm import UNKNOWN, broadcast_row
from megatron_balance.runtime.failure import raise_together

INLINE_NUMBERS = 126

_OTHER_DATA = (
    "the data of this step differs within a model replica: in the data-parallel group of {others} other samples were "
    "read than in that of {first}. Every pipeline stage and context-parallel rank must read the same data, in one "
    "order."
)


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
        numbers: list[int] = []
        error: BalanceError | None = None
        if self.tensor is None or self.tensor.rank() == 0:
            try:
                numbers = self._agreed(own)
            except BalanceError as agreed:
                error = agreed
        if self.tensor is not None:
            text = "" if error is None else str(error)
            failed, numbers = _passed_on(list(text.encode()) or numbers, failed=error is not None, group=self.tensor)
            error = error or (BalanceError(bytes(numbers).decode()) if failed else None)
        if error is not None:
            raise error
        return numbers

    def _agreed(self, own: Share) -> list[int]:
        numbers = own.numbers
        if self.firsts is not None:
            all_have, (_, size) = raise_together(
                own.problem,
                group=self.firsts,
                what="the plans of this model replica (compare)",
                plan=UNKNOWN if numbers is None else (own.digest, len(numbers)),
                differ=_OTHER_DATA,
                named=False,
            )
            if not all_have:
                row = np.array(numbers or [0] * size, dtype=np.int64)
                row = broadcast_row(row, group=self.firsts, what="the plan of this model replica (broadcast)")
                numbers = row.tolist() if numbers is None else numbers
        if own.problem is not None:
            raise BalanceError(own.problem)
        assert numbers is not None, "the first rank of a replica loads data"
        return numbers


def _passed_on(numbers: list[int], *, failed: bool, group: dist.ProcessGroup) -> tuple[bool, list[int]]:
    """The outcome of the group's first rank on all of them: numbers, or the bytes of an error's text."""
    what = "the plan from the first rank of this model replica (broadcast)"
    inline = numbers[:INLINE_NUMBERS] + [0] * (INLINE_NUMBERS - len(numbers))
    row = broadcast_row(np.array([failed, len(numbers), *inline], dtype=np.int64), group=group, what=what)
    count, numbers = int(row[1]), numbers or [0] * int(row[1])
    more = np.array(numbers[INLINE_NUMBERS:], dtype=np.int64)
    if count > INLINE_NUMBERS:
        more = broadcast_row(more, group=group, what=what)
    return bool(row[0]), [*row[2:].tolist(), *more.tolist()][:count]
