"""Gives all ranks of one model replica the same step, or the same error, as the step begins.

Those that load data have made the step, each with its own data-parallel group. All ranks of the replica agree, and the
first of them, which loads data, sends the step to those that load none.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from megatron_balance.errors import BalanceError
from megatron_balance.runtime.comm import UNKNOWN, all_gather_bytes, all_gather_row, joined, waiting_for
from megatron_balance.runtime.failure import differing

_OTHER_DATA = (
    "the data of this step differs within a model replica: in the data-parallel group of {others} other samples were "
    "read than in that of {first}. Every pipeline stage and context-parallel rank must read the same data, in one "
    "order."
)


def share(
    text: str | None = None, *, group: dist.ProcessGroup | None, digest: int = 0, problem: str | None = None
) -> str:
    """Agree on a step; all ranks of the replica call it.

    Args:
        text: of the step that this rank made; None where it loads no data, or has a problem.
        group: the ranks of the replica, over gloo; None for one rank.
        digest: of what must be equal on all ranks that made it, in [0, 2**63).
        problem: error of this rank, raised on every rank of the replica; None without one.

    Returns:
        The text of this rank; where it loads no data, that of the first rank.

    Raises:
        BalanceError: on every rank: a problem on one of them, or different plans.
    """
    if group is None:
        if text is None:
            raise BalanceError(problem or "the one rank of a model replica loads no data.")
        return text
    what = "the plan of this model replica"
    known = UNKNOWN if text is None else digest
    alike, complete = joined(known, fine=problem is None, group=group, what=what)
    if not alike:
        said = (problem or "").encode()
        rows = all_gather_row(np.array([len(said), known]), group=group, what=what)
        if not rows[:, 0].any():
            raise differing(rows[:, 1].tolist(), group=group, text=_OTHER_DATA)
        problems = all_gather_bytes(said, sizes=rows[:, 0], group=group, what=what)
        raise BalanceError(" | ".join(dict.fromkeys(text.decode() for text in problems if text)))
    sent = bytearray((text or "").encode())
    if not complete:
        size = torch.tensor([len(sent)])
        with waiting_for(what, group=group):
            dist.broadcast(size, group=group, group_src=0)
            sent = bytearray(int(size)) if group.rank() else sent
            dist.broadcast(torch.frombuffer(sent, dtype=torch.uint8), group=group, group_src=0)
    return text or sent.decode()
