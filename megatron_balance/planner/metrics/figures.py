"""Defines the figures of a plan, and the imbalance of any grid of costs or seconds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_balance.planner.objectives import OBJECTIVES
from megatron_balance.topology import Topology


@dataclass(frozen=True)
class ScheduleMetrics:
    """Figures of one plan.

    Attributes:
        objective: `step`, `microbatch` or `pipeline`.
        predicted_cost: the objective's value, in units of the cost model (`2**cost_shift` taken back in). A rank is
            `cp_size` GPUs; with dynamic context-parallel sizes it is one of the `dp_size * cp_size` leaves, here and
            below.
        lower_bound: a cost that no plan can beat, same units.
        over_bound: predicted_cost / lower_bound; 1.0 is perfect.
        single_sample_floor: no plan brings step_imbalance below it, because of its largest sample.
        step_imbalance: costliest rank over the mean rank.
        microbatch_imbalance: sum over slots of the costliest rank that meets there, of the slowest group,
            over the sum of the means.
        pipeline_imbalance: longest makespan over that of the same number of equal micro-batches, so that their
            bubble is not counted; step_imbalance where there is one stage.
        padding_fraction: padding over padded tokens.
        peak_tokens: padded tokens of the fullest micro-batch; with dynamic sizes of a leaf's part of it.
        cap_headroom: 1 - peak_tokens / cap, below 0 where a sample is over-long; None without a token cap.
        num_over_cap: micro-batches of two samples or more over the cap (tokens or samples); 0 in a schedule.
        num_microbatches: slots of a rank; with dynamic sizes the most of a leaf.
        num_dummies: empty micro-batches, run as masked dummies.
        moved_tokens: original tokens of samples off their home rank; None where homes are not known.
        moved_off_node_tokens: those of them that leave the node as well; None where nodes are not known either.
        moved_tokens_before_relabel: moved_tokens before interchangeable ranks and slots were exchanged; None where
            they were not, or homes are not known.
        mean_cp_size: ranks that share a token by context parallelism, mean over original tokens.
        tokens_by_cp_size: pairs of a context-parallel size and the original tokens that run at it, sizes rising.
    """

    objective: str
    predicted_cost: int
    lower_bound: int
    over_bound: float
    single_sample_floor: float
    step_imbalance: float
    microbatch_imbalance: float
    pipeline_imbalance: float
    padding_fraction: float
    peak_tokens: int
    cap_headroom: float | None
    num_over_cap: int
    num_microbatches: int
    num_dummies: int
    moved_tokens: int | None
    moved_off_node_tokens: int | None
    moved_tokens_before_relabel: int | None
    mean_cp_size: float
    tokens_by_cp_size: tuple[tuple[int, int], ...]


def slowest_over_mean(grid: NDArray[np.int64] | NDArray[np.float64], *, objective: str, topology: Topology) -> float:
    """The slowest over the mean, of costs or of measured seconds.

    Args:
        grid: `[dp_size, num_microbatches]`; with dynamic context-parallel sizes `[num_leaves, num_microbatches]`.
        objective: `microbatch` sums the slowest rank of each slot, of the slowest group of ranks that wait for one
            another there; any other objective compares sums of ranks.
        topology: the ranks.

    Returns:
        1.0 where all are equal or 0.
    """
    span = sync_group_size(objective, topology=topology)
    of_groups = grid.reshape(-1, span, grid.shape[1]).max(axis=1).sum(axis=1)
    mean = float(grid.sum()) / len(grid)
    return float(of_groups.max()) / mean if mean else 1.0


def sync_group_size(objective: str, *, topology: Topology) -> int:
    """Neighbouring ranks that wait for one another in every micro-batch; 1 where ranks meet once a step.

    With dynamic context-parallel sizes they are all leaves: expert-parallel groups meet through the groups that
    reach over several.
    """
    if topology.dynamic_cp:
        return topology.num_leaves if OBJECTIVES[objective].waits_in_slots() else 1
    return OBJECTIVES[objective].sync_group_size(topology, shares_work=False)
