"""Assigns bins of samples to slots of ranks, the last step of every placement.

Bins come group by group. Those of a group are sorted into rows, and each row is divided among the ranks of the group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_balance.planner.partition import karmarkar_karp_rows
from megatron_balance.planner.problem import Problem, check_total

MAX_REFINED_SAMPLES = 1024
"""Most samples of a batch that is refined, as refining compares pairs; larger batches gain a fraction of a percent."""


@dataclass(frozen=True)
class Placement:
    """The rank and slot of every sample.

    Attributes:
        slot_of: `[num_samples]` int64, `rank * num_microbatches + slot`.
        num_microbatches: slots of every rank.
        cost_grid: `[dp_size, num_microbatches]` int64.
        predicted_cost: the objective's value.
        lower_bound: lower bound on the value of any placement that may move samples.
    """

    slot_of: NDArray[np.int64]
    num_microbatches: int
    cost_grid: NDArray[np.int64]
    predicted_cost: int
    lower_bound: int = 0


def lay_out(
    problem: Problem, bin_of: NDArray[np.int64], *, num_microbatches: int, span: int | None = None
) -> Placement:
    """Gives the bins of each group to its ranks: sorted into rows, a bin of each row to each rank.

    Args:
        problem: the global batch.
        bin_of: `[num_samples]` bins, group by group.
        num_microbatches: rows of a group.
        span: ranks of a group, where they are not those that meet.
    """
    span = span or problem.sync_group_size
    if span == 1:
        return in_order(problem, bin_of, num_microbatches=num_microbatches)
    num_groups = problem.topology.dp_size // span
    heights = np.zeros((num_groups, num_microbatches * span), dtype=np.int64)
    np.add.at(heights.reshape(-1), bin_of, problem.costs)
    order = np.argsort(-heights, axis=1, kind="stable")
    rows = np.take_along_axis(heights, order, axis=1).reshape(num_groups, num_microbatches, span)
    # Dealt so that ranks cost the same in sum.
    ranks = karmarkar_karp_rows(rows) + np.arange(num_groups)[:, None, None] * span
    slot_of_bin = np.empty_like(heights)
    slots = ranks * num_microbatches + np.arange(num_microbatches)[:, None]
    np.put_along_axis(slot_of_bin, order, slots.reshape(num_groups, -1), axis=1)
    return in_order(problem, slot_of_bin.reshape(-1)[bin_of], num_microbatches=num_microbatches)


def in_order(problem: Problem, slot_of: NDArray[np.int64], *, num_microbatches: int) -> Placement:
    """Orders the slots of each rank: a mountain for a pipeline, else by falling cost so that ranks have equal slots."""
    dp_size = problem.topology.dp_size
    own = np.zeros(dp_size * num_microbatches, dtype=np.int64)
    np.add.at(own, slot_of, problem.costs)
    check_total(problem, num_microbatches=num_microbatches)
    own = own.reshape(dp_size, num_microbatches)
    order = problem.timing.slot_order(own)
    new_slot = np.empty_like(order)
    np.put_along_axis(new_slot, order, np.arange(num_microbatches)[None, :].repeat(dp_size, axis=0), axis=1)
    new_slot += np.arange(dp_size)[:, None] * num_microbatches
    slot_of = new_slot.reshape(-1)[slot_of]
    grid = problem.cost_grid(slot_of, num_microbatches=num_microbatches)
    return Placement(
        slot_of=slot_of,
        num_microbatches=num_microbatches,
        cost_grid=grid,
        predicted_cost=problem.predicted_cost(
            grid, image_grid=problem.image_grid(slot_of, num_microbatches=num_microbatches)
        ),
    )
