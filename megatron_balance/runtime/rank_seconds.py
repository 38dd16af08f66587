"""Gathers the measured seconds of every data-parallel rank's steps on one rank.

Invariants: every rank of the group takes part, with the same number of steps; a step that one rank has not measured is
unknown (NaN) for its whole model replica, never zero.
"""

from __future__ import annotations

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_balance.runtime.collectives import gather_row

NOT_MEASURING = -1
"""Stands for the data-parallel rank of a member of the group that measures nothing."""


def gather_rank_seconds(
    seconds: NDArray[np.float64], *, dp_rank: int, dp_size: int, group: dist.ProcessGroup
) -> NDArray[np.float64] | None:
    """Seconds of each model replica: those of its ranks (pipeline stages, context-parallel ranks) together.

    Args:
        seconds: `[num_steps]` of this rank, NaN where a step was not measured.
        dp_rank: data-parallel rank of this rank, or NOT_MEASURING.
        dp_size: data-parallel ranks.
        group: all that take part; gloo. The ranks that measure are as many in each replica.

    Returns:
        `[dp_size, num_steps]` on the first rank of the group, None elsewhere.
    """
    row = np.concatenate([[float(dp_rank)], seconds])
    rows = gather_row(row, group=group, what="the seconds of all ranks (figures)")
    if rows is None:
        return None
    # All or nothing in one sum: a NaN among a replica's ranks makes the replica NaN.
    total = np.zeros((dp_size, seconds.size))
    for rank, *of_steps in rows.tolist():
        if rank != NOT_MEASURING:
            total[int(rank)] += of_steps
    return total


def busiest_over_mean(seconds: NDArray[np.float64]) -> float:
    """The measured imbalance: the busiest rank's seconds over the mean rank's, the mean over the steps.

    Args:
        seconds: `[dp_size, num_steps]`; a step that is not known of every rank is left out.

    Returns:
        At least 1; NaN where no step is known.
    """
    known = seconds[:, np.isfinite(seconds).all(axis=0)]
    known = known[:, known.sum(axis=0) > 0]
    return float((known.max(axis=0) / known.mean(axis=0)).mean()) if known.size else float("nan")
