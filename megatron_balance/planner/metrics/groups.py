"""Figures of a plan whose micro-batches have context-parallel sizes of their own. A rank is a leaf."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cost.model import CostModel
from megatron_balance.planner.dynamic_cp.groups import Groups
from megatron_balance.planner.dynamic_cp.samples import SizedSamples
from megatron_balance.planner.dynamic_cp.sizing import size_samples
from megatron_balance.planner.inputs import sum_segments
from megatron_balance.planner.makespan import pipeline_makespans
from megatron_balance.planner.metrics.figures import ScheduleMetrics, slowest_over_mean
from megatron_balance.planner.objectives import OBJECTIVES, is_makespan
from megatron_balance.topology import Limits, Topology


def group_metrics(
    groups: Groups,
    *,
    of_segments: NDArray[np.int64],
    num_segments: NDArray[np.int64] | None,
    cost_model: CostModel,
    topology: Topology,
    limits: Limits,
    objective: str,
) -> ScheduleMetrics:
    """Figures of micro-batches on groups of leaves; communication is counted in all that are made of costs.

    Args:
        groups: micro-batches with their leaves and slots.
        of_segments: `[sum(num_segments)]` original tokens of every segment.
        num_segments: `[num_samples]` segments of each sample, or None where each is one.
        cost_model: cost of a sample, `cp_exchange` included.
        topology: the ranks, with `dynamic_cp`.
        limits: tokens that a GPU holds in a micro-batch.
        objective: `step`, `microbatch` or `pipeline`.

    Raises:
        BalanceError: micro-batches are limited by samples.
    """
    samples, shift = size_samples(
        of_segments, cost_model=cost_model, topology=topology, limits=limits, num_segments=num_segments
    )
    chosen = OBJECTIVES[objective]
    predicted = chosen.groups_time(samples, groups, topology=topology)
    floor = chosen.groups_floor(samples, topology=topology)
    bound = chosen.timing(topology).at_least(floor, launch=samples.per_microbatch)
    grid = groups.cost_grid(samples)
    step_imbalance = slowest_over_mean(grid, objective="step", topology=topology)

    levels, num_groups = groups.levels[groups.group_of], groups.levels.size
    original = sum_segments(of_segments, num_segments=num_segments)
    on_a_leaf = samples.tokens[levels, np.arange(samples.num_samples)]
    padded = int((on_a_leaf << levels).sum())
    held = np.zeros(num_groups, dtype=np.int64)
    np.add.at(held, groups.group_of, on_a_leaf)
    peak = int(held.max(initial=0))
    num_tokens = max(int(original.sum()), 1)
    return ScheduleMetrics(
        objective=objective,
        predicted_cost=predicted << shift,
        lower_bound=bound << shift,
        over_bound=predicted / bound if bound else 1.0,
        single_sample_floor=_single_sample_floor(samples),
        step_imbalance=step_imbalance,
        microbatch_imbalance=slowest_over_mean(grid, objective="microbatch", topology=topology),
        pipeline_imbalance=(
            step_imbalance
            if topology.pp_size == 1
            else _pipeline_imbalance(grid, samples=samples, topology=topology, groups=groups)
        ),
        padding_fraction=(padded - int(original.sum())) / max(padded, 1),
        peak_tokens=peak,
        cap_headroom=1 - peak / samples.capacity,
        num_over_cap=int(((held > samples.capacity) & (np.bincount(groups.group_of, minlength=num_groups) > 1)).sum()),
        num_microbatches=int(groups.num_slots.max()),
        num_dummies=int(groups.num_slots.sum()) - int((1 << groups.levels).sum()),
        moved_tokens=None,
        moved_off_node_tokens=None,
        moved_tokens_before_relabel=None,
        mean_cp_size=int((original << levels).sum()) / num_tokens,
        tokens_by_cp_size=tuple(
            (1 << level, int(original[levels == level].sum())) for level in np.unique(levels).tolist()
        ),
    )


def _single_sample_floor(samples: SizedSamples) -> float:
    """The sample that is costliest at its cheapest size over a leaf's even share of the least work, at least 1.0."""
    has_room = np.arange(samples.num_levels)[:, None] >= samples.least_levels
    cheapest = np.where(has_room, samples.costs, np.iinfo(np.int64).max).min(axis=0)
    least_work = int((samples.least_costs << samples.least_levels).sum())
    return max(1.0, int(cheapest.max(initial=0)) * samples.num_leaves / least_work) if least_work else 1.0


def _pipeline_imbalance(grid: NDArray[np.int64], *, samples: SizedSamples, topology: Topology, groups: Groups) -> float:
    """See ScheduleMetrics. `grid`: `[num_leaves, num_microbatches]`."""
    mean = np.full((1, grid.shape[1]), -(-int(grid.sum()) // grid.size))
    even = int(pipeline_makespans(mean, pp_size=topology.pp_size, vpp_size=topology.vpp_size)[0])
    # With experts spread over ranks all leaves meet on every stage.
    name = "microbatch" if is_makespan("microbatch", topology=topology) else "pipeline"
    return OBJECTIVES[name].groups_time(samples, groups, topology=topology) / even if even else 1.0
