"""Plans AReaL's batches: trajectories to data-parallel ranks, and a rank's rows to micro-batches.

A trajectory is one sample with a segment for each of its rows, since attention stays within a row. Each unit that must
stay together, a trajectory or a pair of them, is a group, and the planner gives every rank the same number of groups.
Every item goes to one rank. Ranks hold the same number of units where the ranks divide it, else at least one each.
Every rank computes the same plan.

Each rank packs its own rows into micro-batches, since ranks that share rows (tensor, context and pipeline parallelism)
must cut them in the same way. Their number is then agreed on: all ranks take the largest, and those that had fewer
pack again. No micro-batch is over `max_tokens_per_mb` and none is empty; the number is the same on every rank, at least
`n_mbs` and a multiple of `n_mbs_divisor`. Where that is impossible, every rank raises and names the rank and the
reason. Micro-batches come costliest first: ranks that meet in each of them (FSDP) have similar ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.planner import DataSchedule, Images, build_data_schedule
from megatron_balance.runtime.gather import gather_lengths
from megatron_balance.samples.sample import KeySpec, SampleSchema
from megatron_balance.topology import Limits, Topology

MicroBatches = list[list[int]]
"""For every micro-batch the positions of its rows, ascending."""

_COUNTS = SampleSchema((KeySpec("micro-batches and rows", dtype=torch.int64, shape=(), per_token=True),))


def plan_ranks(
    lengths: Sequence[int] | NDArray[np.int64],
    *,
    num_rows: Sequence[int] | NDArray[np.int64],
    dp_size: int,
    cost_model: CostModel,
    ep_size: int = 1,
    unit_size: int = 1,
    images: Images | None = None,
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
        images: of each item; None for no images.
        home_ranks: `[num_items]` rank that has each item; ranks of equal cost are then swapped so that less moves.

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
            "that of the ranks, so that every rank has one. Raise the batch size, or use fewer ranks."
        )
    return build_data_schedule(
        lengths,
        num_segments=num_rows,
        image_patches=images,
        cost_model=cost_model,
        topology=Topology(dp_size, ep_size=ep_size),
        # Samples are counted and not tokens: the cap on tokens is AReaL's own, in its micro-batches.
        limits=Limits(micro_batch_size=num_items),
        groups=np.arange(num_items) // unit_size,
        home_ranks=home_ranks,
    )


def ids_per_rank(schedule: DataSchedule) -> list[list[int]]:
    """`[dp_size]` lists of item ids, ascending in each."""
    destinations = schedule.destinations()
    return [np.flatnonzero(destinations == rank).tolist() for rank in range(schedule.topology.dp_size)]


def plan_microbatches(
    lengths: Sequence[int] | NDArray[Any],
    *,
    max_tokens: int,
    min_microbatches: int = 1,
    divisor: int = 1,
    cost_model: CostModel,
) -> MicroBatches:
    """One rank's micro-batches.

    Args:
        lengths: `[num_rows]` tokens of each row.
        max_tokens: tokens that a micro-batch holds at most (`max_tokens_per_mb`).
        min_microbatches: micro-batches at least (`n_mbs`).
        divisor: their number is a multiple of it (`n_mbs_divisor`).
        cost_model: what a row costs.

    Raises:
        BalanceError: a row is over the cap, or there are fewer rows than micro-batches.
    """
    least = -(-min_microbatches // divisor) * divisor
    _check_enough(len(lengths), num_microbatches=least, divisor=divisor)
    schedule = build_data_schedule(
        lengths,
        cost_model=cost_model,
        topology=Topology(1, microbatch_multiple=divisor),
        limits=Limits(max_tokens),
    )
    if schedule.num_microbatches < least:
        schedule = build_data_schedule(
            lengths,
            cost_model=cost_model,
            topology=Topology(1, microbatch_multiple=least),
            limits=Limits(max_tokens),
        )
    if schedule.oversized:
        raise BalanceError(
            f"a row has {int(schedule.lengths.max())} tokens and max_tokens_per_mb is {max_tokens}: raise it, or cut "
            "rows at that length."
        )
    _check_enough(len(lengths), num_microbatches=schedule.num_microbatches, divisor=divisor)
    costliest_first = np.argsort(-schedule.cost_grid[0], kind="stable")
    return [list(schedule.ranks[0][slot]) for slot in costliest_first]


def plan_agreed_microbatches(
    lengths: Sequence[int] | NDArray[Any],
    *,
    max_tokens: int,
    min_microbatches: int = 1,
    divisor: int = 1,
    cost_model: CostModel,
    group: dist.ProcessGroup | None,
    device: torch.device | str = "cpu",
) -> MicroBatches:
    """`plan_microbatches` with the same number of micro-batches on every rank of a group.

    Args:
        lengths: `[num_rows]` tokens of each of this rank's rows.
        max_tokens: as in `plan_microbatches`, likewise `min_microbatches`, `divisor` and `cost_model`.
        group: the ranks that need the same number of micro-batches; None for this rank alone.
        device: where the collective's buffers live: `cuda` for NCCL.

    Raises:
        BalanceError: on every rank, naming the ranks whose rows cannot be packed so.
    """
    while True:
        planned: MicroBatches = []
        problem: str | None = None
        try:
            planned = plan_microbatches(
                lengths,
                max_tokens=max_tokens,
                min_microbatches=min_microbatches,
                divisor=divisor,
                cost_model=cost_model,
            )
        except BalanceError as error:
            if group is None:
                raise
            problem = str(error)
        if group is None:
            return planned
        counts = gather_lengths([len(planned)], group=group, schema=_COUNTS, problem=problem, device=device)
        min_microbatches = int(counts.lengths.max())
        if (counts.lengths == min_microbatches).all():
            return planned


def _check_enough(num_rows: int, *, num_microbatches: int, divisor: int) -> None:
    if num_rows < num_microbatches:
        raise BalanceError(
            f"{num_rows} rows for {num_microbatches} micro-batches (n_mbs_divisor is {divisor}), as many as on every "
            "rank: none may be empty. Give each rank more rows, raise max_tokens_per_mb, or lower n_mbs or "
            "n_mbs_divisor."
        )
