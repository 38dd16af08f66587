"""Gives rows to ranks: at most `batch_size` rows a rank, nearly equal workloads, few bytes moved.

Rows of padding are not planned: they cost nothing and go where there is room. A rank runs one micro-batch, so this is
a partition with a maximum count; `build_data_schedule` could add a second micro-batch.

Invariants: every row has one rank; no rank has more than `batch_size`; a rank is left without rows only where there
are fewer rows than ranks; every rank computes the same plan.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cost.model import CostModel
from megatron_balance.planner import Batch, Homes, batch_of, keep_local, plan_batch
from megatron_balance.topology import Limits, Topology


def plan_rows(
    workloads: NDArray[np.int64],
    *,
    nbytes: NDArray[np.int64],
    home_ranks: NDArray[np.int64],
    dp_size: int,
    batch_size: int,
) -> NDArray[np.int64]:
    """Gives every row a rank.

    Args:
        workloads: `[num_rows]` non-negative, the real rows of all ranks.
        nbytes: `[num_rows]` bytes that moving each takes.
        home_ranks: `[num_rows]` rank that loaded each.
        dp_size: ranks.
        batch_size: rows that a rank holds at most.

    Returns:
        `[num_rows]` int64 rank of each row.
    """
    if not workloads.size:
        return np.zeros(0, dtype=np.int64)
    # Workloads take the place of lengths: the planner scales sums that would leave int64.
    batch = batch_of(
        workloads,
        cost_model=CostModel.tokens(),
        topology=Topology(dp_size),
        limits=Limits(micro_batch_size=batch_size),
        objective="step",
    )
    assert isinstance(batch, Batch)
    ranks = plan_batch(batch, rows=1).slot_of
    homes = Homes(home_ranks, tokens=nbytes, ranks_per_node=None)
    return keep_local(batch, ranks, num_microbatches=1, homes=homes)


def rows_of_batches(
    ranks: NDArray[np.int64], *, positions: NDArray[np.int64], dp_size: int, batch_size: int
) -> NDArray[np.int64]:
    """The rows of every rank's new batch, as positions in the old batches of all ranks, one after the other.

    Args:
        ranks: `[num_rows]` rank of every real row.
        positions: `[num_rows]` their positions, ascending; all others are padding.
        dp_size: ranks.
        batch_size: rows of a rank's batch, padding included.

    Returns:
        `[dp_size, batch_size]` int64: real rows ascending, then padding ascending. Each position occurs once.
    """
    padding = np.setdiff1d(np.arange(dp_size * batch_size), positions, assume_unique=True)
    rank_of_padding = np.repeat(np.arange(dp_size), batch_size - np.bincount(ranks, minlength=dp_size))
    # A stable sort by rank keeps real rows before padding, and each of them ascending.
    order = np.argsort(np.concatenate([ranks, rank_of_padding]), kind="stable")
    return np.concatenate([positions, padding])[order].reshape(dp_size, batch_size)
