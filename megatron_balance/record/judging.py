"""Judges steps by one cost model: as they were planned, and their samples under Megatron's own sampler.

A step without context-parallel sizes of its own ran at the run's size: its rows are data-parallel ranks, with the costs
of `cp_size` leaves together, also where the run has dynamic sizes (stock).

Invariant: compared steps hold the same samples, and are judged by the same cost model, ranks and limits.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cost.model import CostModel
from megatron_balance.planner import (
    Problem,
    ScheduleMetrics,
    batch_of,
    plan_metrics,
    slowest_over_mean,
    waiting,
)
from megatron_balance.record.run_record import RunInfo
from megatron_balance.record.step import StepRecord, unmeasured


def recosted(step: StepRecord, *, cost_model: CostModel, info: RunInfo) -> StepRecord:
    """The same step with costs by another cost model; measurements stay."""
    problem, sizes = _problem_of(step, cost_model=cost_model, info=info)
    batch = batch_of(problem)
    grid = batch.cost_grid(step.slot_of, sizes)
    return replace(step, cost_grid=grid, cost_shift=batch.shift, cost_model=cost_model)


def step_metrics(step: StepRecord, *, info: RunInfo) -> ScheduleMetrics:
    """Metrics of a step by its own cost model."""
    problem, sizes = _problem_of(step, cost_model=step.cost_model, info=info)
    return plan_metrics(problem, step.slot_of, sizes)


def _problem_of(step: StepRecord, *, cost_model: CostModel, info: RunInfo) -> tuple[Problem, NDArray[np.int64]]:
    """A step's samples and the ranks that its rows are, and the context-parallel size of every micro-batch."""
    topology, sizes = info.topology, step.cp_sizes
    if sizes is None:
        if topology.dynamic_cp:
            topology, cost_model = topology.at_cp_size(topology.cp_size), cost_model.at_cp_size(topology.cp_size)
        sizes = np.full((topology.dp_size, step.num_microbatches), topology.cp_size, dtype=np.int64)
    problem = Problem.of(
        step.segment_lengths,
        num_segments=step.num_segments,
        cost_model=cost_model,
        topology=topology,
        limits=info.limits,
        objective=info.objective,
        home_ranks=step.home_ranks,
    )
    return problem, sizes


def stock_step(step: StepRecord, *, info: RunInfo) -> StepRecord:
    """The samples of a step under Megatron's own sampler: every rank runs those that it loaded, in that order.

    A micro-batch holds `micro_batch_size` samples where that is the limit, else one.
    """
    dp_size, per_slot = info.topology.dp_size, info.limits.micro_batch_size or 1
    homes = step.home_ranks
    if not homes.any():  # not recorded: the sampler deals samples out in turn
        homes = np.arange(step.slot_of.size, dtype=np.int64) % dp_size
    order = np.argsort(homes, kind="stable")
    counts = np.bincount(homes, minlength=dp_size)
    position = np.empty_like(homes)
    position[order] = np.arange(homes.size) - np.repeat(np.cumsum(counts) - counts, counts)
    num_microbatches = max(int(-(-counts.max() // per_slot)), 1)
    placed = replace(
        step,
        slot_of=homes * num_microbatches + position // per_slot,
        num_microbatches=num_microbatches,
        home_ranks=homes,
        cp_sizes=None,
        seconds=unmeasured((dp_size, num_microbatches), cp_sizes=None),
        plan_seconds=0.0,
        exchange_seconds=0.0,
        exposed_seconds=0.0,
    )
    return recosted(placed, cost_model=step.cost_model, info=info)


def rows_of(step: StepRecord, *, info: RunInfo) -> tuple[list[list[list[int]]], NDArray[np.int64]]:
    """Sample ids of each slot, `[row][slot]`, ascending, and the leaves that share it, `[num_rows, num_slots]`.

    Rows are ranks, or leaves where the run has dynamic sizes; 0 leaves share a slot that a leaf does not have.
    """
    order = np.argsort(step.slot_of, kind="stable").tolist()
    ends = np.cumsum(np.bincount(step.slot_of, minlength=step.cost_grid.size)).tolist()
    of_slots = [order[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    num_slots = step.num_microbatches
    ranks = [of_slots[first : first + num_slots] for first in range(0, len(of_slots), num_slots)]
    if step.cp_sizes is None:
        width = info.topology.cp_size if info.topology.dynamic_cp else 1
        rows = [samples for samples in ranks for _ in range(width)]
        return rows, np.full((len(rows), num_slots), width, dtype=np.int64)
    leaves, _ = np.indices(step.cp_sizes.shape)
    first = leaves - leaves % np.maximum(step.cp_sizes, 1)  # samples of a group are noted on its first leaf
    return [[ranks[leaf][slot] for slot, leaf in enumerate(row)] for row in first.tolist()], step.cp_sizes


def costs_of_rows(step: StepRecord, *, info: RunInfo) -> NDArray[np.float64]:
    """Costs of a step, in its units, with rows as `rows_of` has them."""
    costs = step.cost_grid.astype(np.float64)
    if info.topology.dynamic_cp and step.cp_sizes is None:
        return np.repeat(costs / info.topology.cp_size, info.topology.cp_size, axis=0)
    return costs


def imbalance(grid: NDArray[np.float64] | NDArray[np.int64], *, info: RunInfo) -> float:
    """`slowest_over_mean` by the run's objective, of a step's costs or measured seconds."""
    return slowest_over_mean(grid, objective=info.objective, topology=info.topology)


def is_measured(step: StepRecord) -> bool:
    """True if the micro-batches of every rank were measured."""
    return not np.isnan(step.seconds).any()


def is_slowest(step: StepRecord, *, info: RunInfo) -> NDArray[np.bool_]:
    """`[num_rows, num_microbatches]` True where the rank is the costliest of those that meet, and was measured.

    Its seconds contain no waiting; those of the other ranks do.
    """
    groups = step.cost_grid.reshape(-1, waiting(info.objective, topology=info.topology).span, step.num_microbatches)
    own = (groups == groups.max(axis=1, keepdims=True)).reshape(step.cost_grid.shape)
    return own & (step.seconds > 0)
