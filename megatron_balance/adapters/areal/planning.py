"""Which data-parallel rank gets which trajectory: AReaL's items as groups of one global batch.

A trajectory is one sample with a segment for each of its rows, since attention stays within a row. Each unit that must
stay together, a trajectory or a pair of them, is a group, and the planner gives every rank the same number of groups.

Invariants: every item goes to one rank; ranks hold the same number of units where it divides, else each at least one;
the same answer on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.planner.build import build_data_schedule
from megatron_balance.planner.schedule import DataSchedule
from megatron_balance.topology import Limits, Topology


def plan_ranks(
    lengths: Sequence[int] | NDArray[np.int64],
    *,
    num_rows: Sequence[int] | NDArray[np.int64],
    dp_size: int,
    cost_model: CostModel,
    ep_size: int = 1,
    unit_size: int = 1,
    home_ranks: NDArray[np.int64] | None = None,
) -> DataSchedule:
    """Gives every rank as many units as the others, of nearly the same cost.

    Args:
        lengths: `[sum(num_rows)]` tokens of every row, item after item.
        num_rows: `[num_items]` rows of each item.
        dp_size: data-parallel ranks.
        cost_model: what a row costs.
        ep_size: expert-parallel ranks.
        unit_size: consecutive items that stay together, such as the two answers of a reward pair.
        home_ranks: `[num_items]` rank that has each item; ranks that come out alike are then named so that less moves.

    Returns:
        DataSchedule: `destinations()` is the rank of each item.

    Raises:
        BalanceError: items do not make up whole units, or there are fewer units than ranks.
    """
    num_items = len(num_rows)
    if unit_size < 1 or num_items % unit_size:
        raise BalanceError(
            f"the number of items ({num_items}) must be divisible by group_size ({unit_size}), which stay together."
        )
    num_units = num_items // unit_size
    if num_units < dp_size:
        raise BalanceError(
            f"{num_units} trajectories (or groups of them) for {dp_size} data-parallel ranks: their number must be >= "
            "that of the ranks, so that none trains on nothing. Raise the batch size, or use fewer ranks."
        )
    return build_data_schedule(
        lengths,
        num_segments=num_rows,
        cost_model=cost_model,
        topology=Topology(dp_size, ep_size=ep_size),
        # Samples are counted and not tokens: the cap on tokens is AReaL's own, in its micro-batches.
        limits=Limits(micro_batch_size=num_items),
        groups=np.arange(num_items) // unit_size,
        home_ranks=home_ranks,
    )


def ids_per_rank(schedule: DataSchedule) -> list[list[int]]:
    """`[dp_size]` lists of item ids, rising in each."""
    destinations = schedule.destinations()
    return [np.flatnonzero(destinations == rank).tolist() for rank in range(schedule.topology.dp_size)]
