"""From lengths to a schedule with dynamic context-parallel sizes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cost.model import CostModel
from megatron_balance.planner.dynamic_cp.objectives import group_objective
from megatron_balance.planner.dynamic_cp.schedule import DynamicCpSchedule
from megatron_balance.planner.dynamic_cp.sizing import size_samples
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
        BalanceError: micro-batches are limited by samples instead of tokens, or the objective plans at one size only.
    """
    samples, shift = size_samples(
        lengths, cost_model=cost_model, topology=topology, limits=limits, num_segments=num_segments
    )
    chosen = group_objective(objective)
    floor = chosen.work_floor(samples, topology)
    return DynamicCpSchedule.of_groups(
        chosen.place(samples, topology, floor),
        lengths=lengths,
        num_segments=num_segments,
        home_ranks=home_ranks,
        samples=samples,
        cost_shift=shift,
        objective=objective,
        algorithm="level_packing",
        lower_bound=chosen.bound(samples, topology, floor),
        topology=topology,
        limits=limits,
        cost_model=cost_model,
    )
