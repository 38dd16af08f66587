"""Figures of a plan: imbalance, padding, room under the cap, context-parallel sizes.

A plan may be judged by another cost model than it was made with (a plan by tokens judged by FLOPs). What is no schedule
at all, such as the stock order, is an `Assignment` as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cost.model import MAX_TOTAL_COST
from megatron_balance.planner.batch import ForestBatch, SizedBatch, batch_of
from megatron_balance.planner.level_packing import Batch
from megatron_balance.planner.objective import waiting
from megatron_balance.planner.problem import Ints
from megatron_balance.topology import Topology

if TYPE_CHECKING:
    from megatron_balance.planner.schedule import Assignment


@dataclass(frozen=True)
class ScheduleMetrics:
    """Figures of one plan.

    Attributes:
        objective: `step`, `microbatch` or `pipeline`.
        predicted_cost: the objective's value, on one GPU in units of the cost model. Below, a rank is a data-parallel
            one; with dynamic context-parallel sizes one of the `dp_size * cp_size` DP×CP ranks.
        lower_bound: a cost that no plan can beat, same units.
        over_bound: predicted_cost / lower_bound; 1.0 is perfect.
        unavoidable_waiting: the part of the GPUs' time that they wait even in a plan at its lower bound, since a sample
            is not cut at these context-parallel sizes: larger sizes remove it.
        step_imbalance: costliest rank over the mean rank.
        padding_fraction: padding over padded tokens.
        peak_tokens: padded tokens of the fullest micro-batch; with dynamic sizes of a rank's part of it.
        cap_headroom: 1 - peak_tokens / cap, below 0 where a sample is over-long; None without a token cap.
        num_over_cap: micro-batches of two samples or more over the cap (tokens or samples); 0 in a schedule.
        num_microbatches: slots of a rank; with dynamic sizes the most of a rank.
        computed_tokens: padded tokens of all micro-batches: in a forest those that samples share count once in each.
        mean_cp_size: ranks that share a token by context parallelism, mean over original tokens.
    """

    objective: str
    predicted_cost: int
    lower_bound: int
    over_bound: float
    unavoidable_waiting: float
    step_imbalance: float
    padding_fraction: float
    peak_tokens: int
    cap_headroom: float | None
    num_over_cap: int
    num_microbatches: int
    computed_tokens: int
    mean_cp_size: float


def gpu_costs(
    batch: Batch | SizedBatch | ForestBatch, microbatch_of: Ints, cp_sizes: Ints, *, topology: Topology
) -> tuple[NDArray[Any], int, int]:
    """`cost_grid`, `predicted_cost` and `lower_bound` as of a DataSchedule: on one GPU, in units of the cost model."""
    grid, unit = batch.cost_grid(microbatch_of, cp_sizes), 1 << max(batch.shift, 0)
    gpus = topology.gpus_per_rank << max(-batch.shift, 0)
    if batch.shift > 0 and int(grid.astype(object).sum()) * unit >= MAX_TOTAL_COST:
        grid = grid.astype(object)
    # The stages of a makespan have shared the work already.
    stages = topology.pp_size if batch.waiting.is_makespan else 1
    predicted, bound = batch.time(microbatch_of, cp_sizes) * stages, batch.lower_bound() * stages
    return -(-grid * unit // gpus), -(-predicted * unit // gpus), -(-bound * unit // gpus)


def plan_metrics(assignment: Assignment) -> ScheduleMetrics:
    """Figures of samples in micro-batches."""
    topology, limits, original = assignment.topology, assignment.limits, assignment.lengths
    microbatch_of, cp_sizes, padded = assignment.microbatch_of, assignment.cp_size_grid, assignment.padded_lengths
    batch = batch_of(assignment)
    grid, predicted, bound = gpu_costs(batch, microbatch_of, cp_sizes, topology=topology)
    # With sizes of their own the cap is a rank's, else that of all context-parallel ranks together.
    held, cap = assignment.microbatch_tokens(), limits.max_tokens_per_microbatch(topology)
    if topology.dynamic_cp:
        held, cap = held // np.maximum(cp_sizes.reshape(-1), 1), limits.max_tokens_per_gpu
    peak, sizes = int(held.max()), cp_sizes.reshape(-1)[microbatch_of]
    return ScheduleMetrics(
        objective=assignment.objective,
        predicted_cost=predicted,
        lower_bound=bound,
        over_bound=predicted / bound if bound else 1.0,
        unavoidable_waiting=unavoidable_waiting(grid, lower_bound=bound),
        step_imbalance=slowest_over_mean(grid, objective="step", topology=topology),
        padding_fraction=int((padded - original).sum()) / max(int(padded.sum()), 1),
        peak_tokens=peak,
        cap_headroom=None if cap is None else 1 - peak / cap,
        num_over_cap=int(assignment.is_over_cap().sum()),
        num_microbatches=cp_sizes.shape[1],
        computed_tokens=int(assignment.computed_lengths.sum()),
        mean_cp_size=(
            int((original * sizes).sum()) / max(int(original.sum()), 1)
            if topology.dynamic_cp
            else float(topology.cp_size)
        ),
    )


def slowest_over_mean(grid: NDArray[Any], *, objective: str, topology: Topology) -> float:
    """The slowest over the mean, of costs or of measured seconds, `[num_ranks, num_microbatches]`; 1.0 where all are 0.

    `microbatch` sums the slowest rank of each slot, of the slowest group of ranks that wait for one another there, and
    `pipeline` with experts spread over ranks too; else sums of ranks are compared. Ranks may be DP×CP ranks.
    """
    width = waiting(objective, topology=topology).sync_size
    of_groups = grid.reshape(-1, width, grid.shape[1]).max(axis=1).sum(axis=1)
    mean = float(grid.sum()) / len(grid)
    return float(of_groups.max()) / mean if mean else 1.0


def unavoidable_waiting(grid: NDArray[Any], *, lower_bound: int) -> float:
    """The part of the GPUs' time, from 0 to 1, that they wait even in a plan at its lower bound (ScheduleMetrics).

    `grid`: costs of any plan of the batch on each GPU, `[num_ranks, num_microbatches]`. The bubble of a pipeline's
    equal micro-batches is not counted.

    Examples:
        >>> costs = np.array([[900], [100], [100], [100]])  # one sample is three quarters of the work of four ranks
        >>> unavoidable_waiting(costs, lower_bound=900)
        0.6666666666666667
    """
    return max(1 - float(grid.sum()) / (len(grid) * lower_bound), 0.0) if lower_bound else 0.0
