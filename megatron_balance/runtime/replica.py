"""Gives all ranks of one model replica the same step, or the same error, as the step begins.

The *firsts* are the first ranks of the replica's tensor-parallel groups: one for every pipeline stage and
context-parallel rank. Those that load data have made the step, each with its own data-parallel group. They agree, the
first of them sends the step to those that load none, and each passes the outcome on within its tensor-parallel group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch.distributed as dist

from megatron_balance.errors import BalanceError
from megatron_balance.runtime.comm import UNKNOWN, all_gather_bytes, all_gather_row, broadcast_text, joined
from megatron_balance.runtime.failure import differing

_OTHER_DATA = (
    "the data of this step differs within a model replica: in the data-parallel group of {others} other samples were "
    "read than in that of {first}. Every pipeline stage and context-parallel rank must read the same data, in one "
    "order."
)
_STEP, _ERROR = "=", "!"


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

    def share(self, text: str | None = None, *, digest: int = 0, problem: str | None = None) -> str:
        """Agree on a step; all ranks of the replica call it.

        Args:
            text: of the step that this rank made; None where it loads no data, or has a problem.
            digest: of what must be equal on all ranks that made it, in [0, 2**63).
            problem: error of this rank, raised on every rank of the replica; None without one.

        Returns:
            The text of this rank; where it loads no data, that of the first that does.

        Raises:
            BalanceError: on every rank: a problem on one of them, or different plans.
        """
        outcome, error = "", None
        if self.tensor is None or self.tensor.rank() == 0:
            try:
                outcome = _STEP + self._agreed(text, digest=digest, problem=problem)
            except BalanceError as agreed:
                outcome, error = _ERROR + str(agreed), agreed
        if self.tensor is not None:
            what = "the plan from the first rank of this model replica (broadcast)"
            outcome = broadcast_text(outcome, group=self.tensor, what=what)
        if outcome.startswith(_ERROR):
            raise error or BalanceError(outcome[1:])
        return outcome[1:]

    def _agreed(self, text: str | None, *, digest: int, problem: str | None) -> str:
        if problem is None and self.firsts is None:
            assert text is not None, "the first rank of a replica loads data"
            return text
        if self.firsts is None:
            raise BalanceError(problem or "")
        what = "the plans of this model replica (compare)"
        known = UNKNOWN if text is None else digest
        alike, complete = joined(known, fine=problem is None, group=self.firsts, what=what)
        if not alike:
            said = (problem or "").encode()
            rows = all_gather_row(np.array([len(said), known]), group=self.firsts, what=what)
            if not rows[:, 0].any():
                raise differing(rows[:, 1].tolist(), group=self.firsts, text=_OTHER_DATA)
            problems = all_gather_bytes(said, sizes=rows[:, 0], group=self.firsts, what=what)
            raise BalanceError(" | ".join(dict.fromkeys(text.decode() for text in problems if text)))
        if complete:
            return text or ""
        sent = broadcast_text(text or "", group=self.firsts, what="the plan of this model replica (broadcast)")
        return sent if text is None else text
