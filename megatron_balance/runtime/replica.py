"""Gives all ranks of one model replica the same plan, or the same error.

Pipeline stages and context-parallel ranks make the plan, each with its own data-parallel group. Tensor-parallel ranks
that read no data receive the numbers that they need from the first rank.
"""

from __future__ import annotations

import numpy as np
import torch.distributed as dist

from megatron_balance.errors import BalanceError
from megatron_balance.runtime.collectives import all_gather_bytes, all_gather_row, broadcast_row, ranks_where

KIND, NUM_VALUES, DIGEST = range(3)
LISTENS, PLANNED, FAILED = range(3)


def share_counts(
    counts: list[int] | None, *, group: dist.ProcessGroup, digest: int = 0, problem: str | None = None
) -> list[int]:
    """The numbers that the ranks of a replica use, equal on all of them.

    One all_gather of three int64, and a broadcast where some rank listens.

    Args:
        counts: what this rank planned; None where it reads no data, or has a problem.
        group: the ranks of the replica; its first rank reads data; gloo.
        digest: of everything else that must be equal, in [0, 2**63).
        problem: error of this rank. It is raised here, on every rank of the replica.

    Returns:
        `counts` of the first rank.

    Raises:
        BalanceError: on every rank: a problem on one of them, or different plans.
    """
    message = b"" if problem is None else problem.encode()
    row = np.array([LISTENS, 0, 0], dtype=np.int64)
    if problem is not None:
        row[:] = FAILED, len(message), 0
    elif counts is not None:
        row[:] = PLANNED, len(counts), digest
    rows = all_gather_row(row, group=group, what="the plans of this model replica (compare)")
    failed = rows[:, KIND] == FAILED
    if failed.any():
        sizes = np.where(failed, rows[:, NUM_VALUES], 0)
        texts = all_gather_bytes(message, nbytes=sizes, group=group, what="the errors of this model replica")
        raise BalanceError(" | ".join(dict.fromkeys(text.decode() for text in texts if text)))
    planned = rows[:, KIND] == PLANNED
    first = rows[0]
    differ = planned & (rows[:, NUM_VALUES:] != first[NUM_VALUES:]).any(axis=1)
    if differ.any():
        raise BalanceError(
            "the data of this step differs within a model replica: in the data-parallel group of "
            f"{ranks_where(differ, group=group)} other samples were read than in that of "
            f"rank {dist.get_global_rank(group, 0)}. "
            "Every pipeline stage and context-parallel rank must read the same data, in one order."
        )
    if planned.all():
        assert counts is not None, "planned"
        return counts
    own = np.array(counts if group.rank() == 0 else [0] * int(first[NUM_VALUES]), dtype=np.int64)
    what = "the plan from the first rank of this model replica (broadcast)"
    return broadcast_row(own, group=group, what=what).tolist()
