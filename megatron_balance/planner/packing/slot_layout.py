"""From bins of samples to slots of ranks: the last step of every way to place samples.

Bins come group by group. Those of a group are sorted into rows, and each row is dealt to the ranks of the group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_balance.planner.makespan import mountain_order
from megatron_balance.planner.partition import karmarkar_karp_rows
from megatron_balance.planner.problem import Problem, check_total


@dataclass(frozen=True)
class Placement:
    """Where every sample runs.

    Attributes:
        slot_of: `[num_samples]` int64, `rank * num_microbatches + slot`.
        num_microbatches: slots of every rank.
        cost_grid: `[dp_size, num_microbatches]` int64.
        predicted_cost: the objective's value.
        lower_bound: what no placement that moves samples at will can beat.
    """

    slot_of: NDArray[np.int64]
    num_microbatches: int
    cost_grid: NDArray[np.int64]
    predicted_cost: int
    lower_bound: int = 0


def lay_out(
    problem: Problem, bin_of: NDArray[np.int64], *, num_microbatches: int, span: int | None = None
) -> Placement:
    """Gives the bins of each group to its ranks: sorted into rows, the rows dealt so that ranks cost the same."""
    span = span or problem.sync_span
    if span == 1:
        return in_order(problem, bin_of, num_microbatches=num_microbatches)
    num_bins = problem.topology.dp_size * num_microbatches
    heights = np.zeros(num_bins, dtype=np.int64)
    np.add.at(heights, bin_of, problem.costs)
    slot_of_bin = np.empty(num_bins, dtype=np.int64)
    for first_rank in range(0, problem.topology.dp_size, span):
        first_bin = first_rank * num_microbatches
        of_group = heights[first_bin : first_bin + span * num_microbatches]
        order = np.argsort(-of_group, kind="stable")
        ranks = first_rank + karmarkar_karp_rows(of_group[order].reshape(num_microbatches, span))
        slots = ranks * num_microbatches + np.arange(num_microbatches)[:, None]
        slot_of_bin[first_bin + order] = slots.reshape(-1)
    return in_order(problem, slot_of_bin[bin_of], num_microbatches=num_microbatches)


def in_order(problem: Problem, slot_of: NDArray[np.int64], *, num_microbatches: int) -> Placement:
    """Orders the slots of each rank: a mountain for a pipeline, else by falling cost so that ranks are alike."""
    dp_size = problem.topology.dp_size
    own = np.zeros(dp_size * num_microbatches, dtype=np.int64)
    np.add.at(own, slot_of, problem.costs)
    check_total(problem, num_microbatches=num_microbatches)
    own = own.reshape(dp_size, num_microbatches)
    order = mountain_order(own) if problem.in_pipeline else np.argsort(-own, axis=1, kind="stable")
    new_slot = np.empty_like(order)
    np.put_along_axis(new_slot, order, np.arange(num_microbatches)[None, :].repeat(dp_size, axis=0), axis=1)
    new_slot += np.arange(dp_size)[:, None] * num_microbatches
    slot_of = new_slot.reshape(-1)[slot_of]
    grid = problem.cost_grid(slot_of, num_microbatches=num_microbatches)
    return Placement(
        slot_of=slot_of,
        num_microbatches=num_microbatches,
        cost_grid=grid,
        predicted_cost=problem.predicted_cost(grid),
    )
