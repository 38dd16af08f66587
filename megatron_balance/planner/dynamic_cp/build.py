"""From lengths to a schedule with dynamic context-parallel sizes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cost.model import CostModel
from megatron_balance.planner.dynamic_cp.objectives import GROUP_OBJECTIVES, cost_grid, work_floor
from megatron_balance.planner.dynamic_cp.schedule import DynamicCpSchedule
from megatron_balance.planner.dynamic_cp.sizing import size_samples
from megatron_balance.planner.inputs import sum_segments
from megatron_balance.topology import Limits, Topology


def build_dynamic_cp_schedule(
    lengths: NDArray[np.int64],
    *,
    cost_model: CostModel,
    topology: Topology,
    limits: Limits,
    objective: str,
    num_segments: NDArray[np.int64] | None,
    home_ranks: NDArray[np.int64] | None,
) -> DynamicCpSchedule:
    """Plans one global batch; arguments as `build_data_schedule` has checked them.

    Args:
        lengths: `[num_samples]` original tokens; with `num_segments`, of every segment.
        cost_model: what a sample costs, `cp_exchange` included.
        topology: the ranks, with `dynamic_cp`.
        limits: tokens that a GPU holds in a micro-batch.
        objective: `step`, `microbatch` or `pipeline`.
        num_segments: `[num_samples]` segments of each sample, or None where each is one.
        home_ranks: `[num_samples]` rank that loaded each sample, or None; it changes nothing.

    Raises:
        BalanceError: micro-batches are limited by samples instead of tokens.
    """
    samples, shift = size_samples(
        lengths, cost_model=cost_model, topology=topology, limits=limits, num_segments=num_segments
    )
    chosen = GROUP_OBJECTIVES[objective]
    floor = work_floor(samples, topology, objective=objective)
    groups = chosen.place(samples, topology, floor)
    num_microbatches = int(groups.num_slots.max())
    levels = groups.levels[groups.group_of]
    return DynamicCpSchedule(
        slot_of=groups.first_leaves[groups.group_of] * num_microbatches + groups.slots[groups.group_of],
        num_microbatches=num_microbatches,
        cost_grid=cost_grid(samples, groups),
        cost_shift=shift,
        predicted_cost=chosen.time(samples, topology, groups),
        lower_bound=chosen.bound(samples, topology, floor),
        objective=objective,
        algorithm="level_packing",
        lengths=sum_segments(lengths, num_segments=num_segments),
        padded_lengths=samples.tokens[levels, np.arange(levels.size)] << levels,
        num_segments=num_segments,
        segment_lengths=None if num_segments is None else lengths,
        oversized=tuple(np.flatnonzero(samples.oversized).tolist()),
        home_ranks=home_ranks,
        move_samples=True,
        moved_tokens_before_relabel=None,
        ranks_per_node=None,
        groups=None,
        topology=topology,
        limits=limits,
        cost_model=cost_model,
        cp_groups=groups,
    )
