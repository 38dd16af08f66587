"""Computes costs and metrics of steps under one cost model: as recorded, planned, or under Megatron's own sampler.

With dynamic context-parallel sizes a step without sizes of its own (stock) ran at the run's: a row is a data-parallel
rank and its costs are those of `cp_size` leaves together.

Invariant: compared steps hold the same samples, or are marked otherwise; they are judged by the same cost model, ranks
and limits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cost.model import CostModel
from megatron_balance.planner import ScheduleMetrics, assignment_metrics, batch_of, plan_metrics, slowest_over_mean
from megatron_balance.record.run_record import RunInfo
from megatron_balance.record.step import StepRecord, unmeasured
from megatron_balance.topology import Topology


def assigned_step(
    slot_of: NDArray[np.int64],
    *,
    iteration: int,
    num_microbatches: int,
    segment_lengths: NDArray[np.int64],
    num_segments: NDArray[np.int64],
    home_ranks: NDArray[np.int64],
    cost_model: CostModel,
    info: RunInfo,
    cp_sizes: NDArray[np.int64] | None = None,
) -> StepRecord:
    """A step whose costs are those of a cost model. Arguments are the fields of StepRecord."""
    if cp_sizes is None:
        topology, at_one_size = _at_one_size(info.topology, cost_model)
        sizes = np.full((topology.dp_size, num_microbatches), topology.cp_size, dtype=np.int64)
    else:
        topology, at_one_size, sizes = info.topology, cost_model, cp_sizes
    batch = batch_of(
        segment_lengths,
        cost_model=at_one_size,
        topology=topology,
        limits=info.limits,
        objective=info.objective,
        num_segments=num_segments,
    )
    grid = batch.cost_grid(slot_of, sizes)
    return StepRecord(
        iteration=iteration,
        num_microbatches=num_microbatches,
        segment_lengths=segment_lengths,
        num_segments=num_segments,
        slot_of=slot_of,
        home_ranks=home_ranks,
        cost_grid=grid,
        cost_shift=batch.shift,
        cost_model=cost_model,
        plan_seconds=0.0,
        exchange_seconds=0.0,
        exposed_seconds=0.0,
        seconds=unmeasured(grid.shape, cp_sizes=cp_sizes),
        cp_sizes=cp_sizes,
    )


def _at_one_size(topology: Topology, cost_model: CostModel) -> tuple[Topology, CostModel]:
    """Ranks and cost of a step without sizes of its own."""
    if not topology.dynamic_cp:
        return topology, cost_model
    return topology.at_cp_size(topology.cp_size), cost_model.at_cp_size(topology.cp_size)


def recosted(step: StepRecord, *, cost_model: CostModel, info: RunInfo) -> StepRecord:
    """The same step with costs by another cost model; measurements stay."""
    judged = assigned_step(
        step.slot_of,
        iteration=step.iteration,
        num_microbatches=step.num_microbatches,
        segment_lengths=step.segment_lengths,
        num_segments=step.num_segments,
        home_ranks=step.home_ranks,
        cost_model=cost_model,
        info=info,
        cp_sizes=step.cp_sizes,
    )
    return replace(step, cost_grid=judged.cost_grid, cost_shift=judged.cost_shift, cost_model=cost_model)


def stock_slots(home_ranks: NDArray[np.int64], *, info: RunInfo) -> tuple[NDArray[np.int64], int]:
    """Slots under Megatron's own sampler: every rank runs the samples that it loaded, in that order.

    A micro-batch holds `micro_batch_size` samples where that is the limit, else one.

    Returns:
        `slot_of` and `num_microbatches` of a StepRecord.
    """
    per_slot = info.limits.micro_batch_size or 1
    order = np.argsort(home_ranks, kind="stable")
    counts = np.bincount(home_ranks, minlength=info.topology.dp_size)
    position = np.empty_like(home_ranks)
    position[order] = np.arange(home_ranks.size) - np.repeat(np.cumsum(counts) - counts, counts)
    num_microbatches = max(int(-(-counts.max() // per_slot)), 1)
    return home_ranks * num_microbatches + position // per_slot, num_microbatches


def stock_step(step: StepRecord, *, info: RunInfo) -> StepRecord:
    """The samples of a step under Megatron's own sampler."""
    homes = step.home_ranks
    if not homes.any():
        # Home ranks were not recorded: the sampler gives samples to ranks in turn.
        homes = np.arange(step.slot_of.size, dtype=np.int64) % info.topology.dp_size
    slot_of, num_microbatches = stock_slots(homes, info=info)
    return assigned_step(
        slot_of,
        iteration=step.iteration,
        num_microbatches=num_microbatches,
        segment_lengths=step.segment_lengths,
        num_segments=step.num_segments,
        home_ranks=homes,
        cost_model=step.cost_model,
        info=info,
    )


def samples_of_slots(step: StepRecord) -> list[list[int]]:
    """`[dp_size * num_microbatches]` lists of sample ids, ascending; rank by rank, slot by slot.

    With dynamic context-parallel sizes rows are leaves, and the samples of a group are on its first one.
    """
    order = np.argsort(step.slot_of, kind="stable").tolist()
    ends = np.cumsum(np.bincount(step.slot_of, minlength=step.cost_grid.size)).tolist()
    return [order[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def samples_of_ranks(step: StepRecord) -> list[list[list[int]]]:
    """`samples_of_ranks(step)[rank][slot]` are sample ids, ascending; those of a group are on all its leaves."""
    slots, num_slots = samples_of_slots(step), step.num_microbatches
    ranks = [slots[first : first + num_slots] for first in range(0, len(slots), num_slots)]
    if step.cp_sizes is None:
        return ranks
    sizes: list[list[int]] = step.cp_sizes.tolist()
    return [
        [ranks[leaf - leaf % size][slot] for slot, size in enumerate(of_leaf) if size]
        for leaf, of_leaf in enumerate(sizes)
    ]


def step_metrics(step: StepRecord, *, info: RunInfo) -> ScheduleMetrics:
    """Metrics of a step by its own cost model."""
    if step.cp_sizes is not None:
        return plan_metrics(
            step.slot_of,
            step.cp_sizes,
            of_segments=step.segment_lengths,
            num_segments=step.num_segments,
            images=None,
            cost_model=step.cost_model,
            topology=info.topology,
            limits=info.limits,
            objective=info.objective,
            home_ranks=None,
            ranks_per_node=None,
        )
    topology, cost_model = _at_one_size(info.topology, step.cost_model)
    return assignment_metrics(
        samples_of_ranks(step),
        lengths=step.segment_lengths,
        num_segments=step.num_segments,
        cost_model=cost_model,
        topology=topology,
        limits=info.limits,
        objective=info.objective,
        home_ranks=step.home_ranks,
    )


def costs_of_rows(step: StepRecord, *, info: RunInfo) -> NDArray[np.float64]:
    """Costs of a step with a row for each that a run's timeline has: ranks, or leaves where sizes differ."""
    costs = step.cost_grid.astype(np.float64)
    cp_size = info.topology.cp_size
    if info.topology.dynamic_cp and step.cp_sizes is None:
        return np.repeat(costs / cp_size, cp_size, axis=0)
    return costs


@dataclass(frozen=True)
class Row:
    """One row of a step's timeline: a rank's micro-batches, or a leaf's where sizes differ.

    Attributes:
        samples: sample ids of each slot, ascending.
        cp_sizes: leaves that share each slot, 0 where the row has no such slot; empty where sizes do not differ.
    """

    samples: list[list[int]]
    cp_sizes: list[int]


def rows_of(step: StepRecord, *, info: RunInfo) -> list[Row]:
    """The rows of a step, as `costs_of_rows` has them."""
    slots, num_slots, cp_size = samples_of_slots(step), step.num_microbatches, info.topology.cp_size
    ranks = [slots[first : first + num_slots] for first in range(0, len(slots), num_slots)]
    if not info.topology.dynamic_cp:
        return [Row(samples, []) for samples in ranks]
    if step.cp_sizes is None:
        return [Row(samples, [cp_size] * num_slots) for samples in ranks for _ in range(cp_size)]
    sizes: list[list[int]] = step.cp_sizes.tolist()
    return [
        Row([ranks[leaf - leaf % max(size, 1)][slot] for slot, size in enumerate(of_leaf)], of_leaf)
        for leaf, of_leaf in enumerate(sizes)
    ]


def imbalance(grid: NDArray[np.float64] | NDArray[np.int64], *, info: RunInfo) -> float:
    """`slowest_over_mean` by the run's objective, of a step's costs or measured seconds."""
    return slowest_over_mean(grid, objective=info.objective, topology=info.topology)
