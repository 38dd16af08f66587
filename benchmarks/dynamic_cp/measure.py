"""Times of plans over the ideal: all work, spread evenly over all ranks, without communication or padding."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.dynamic_cp.dev_scheduler import Rows
from benchmarks.dynamic_cp.setups import OBJECTIVES, DynamicSetup, cost_model
from benchmarks.planner.measure import timed
from megatron_balance import build_data_schedule
from megatron_balance.planner import DataSchedule, SizedBatch, batch_of


@dataclass(frozen=True)
class Cell:
    """Plans of one setup at one cost of communication, for one objective: means over batches."""

    setup: str
    exchange: float
    objective: str
    ours: float
    bound: float
    dev: float | None
    fixed: float
    worst: float
    mean_size: float
    num_over_cap: int


@dataclass(frozen=True)
class PlanningTime:
    setup: str
    objective: str
    cpu_ms: float
    over_bound: float


def plan(batch: NDArray[np.int64], *, setup: DynamicSetup, exchange: float, objective: str) -> DataSchedule:
    return build_data_schedule(
        batch,
        cost_model=cost_model(exchange),
        topology=replace(setup.topology, **OBJECTIVES[objective]),
        limits=setup.limits,
    )


def measure_cell(
    setup: DynamicSetup,
    *,
    exchange: float,
    objective: str,
    planned: list[tuple[NDArray[np.int64], Rows | None]],
) -> Cell:
    """Plans every batch. `planned`: batches, each with the rows of dev's scheduler."""
    ours: list[float] = []
    bounds: list[float] = []
    devs: list[float] = []
    fixed: list[float] = []
    sizes: list[float] = []
    num_over_cap = 0
    for batch, rows in planned:
        schedule = plan(batch, setup=setup, exchange=exchange, objective=objective).check()
        samples = batch_of(schedule)
        assert isinstance(samples, SizedBatch)
        ideal = sum(cost_model(0)(length) for length in batch.tolist()) / samples.dp_cp_size
        level = setup.topology.cp_size.bit_length() - 1
        ours.append(schedule.predicted_cost / ideal)
        bounds.append(schedule.lower_bound / ideal)
        fixed.append((int(samples.costs[level].sum()) << level) / samples.dp_cp_size / ideal)
        if rows is not None:
            devs.append(time_of_rows(rows, samples=samples, objective=objective) / ideal)
        sample_cp_sizes = schedule.cp_size_grid.reshape(-1)[schedule.microbatch_of]
        sizes.append(float((batch * sample_cp_sizes).sum() / batch.sum()))
        num_over_cap += schedule.metrics().num_over_cap
    return Cell(
        setup.name,
        exchange,
        objective,
        ours=statistics.fmean(ours),
        bound=statistics.fmean(bounds),
        dev=statistics.fmean(devs) if devs else None,
        fixed=statistics.fmean(fixed),
        worst=max(time / bound for time, bound in zip(ours, bounds, strict=True)),
        mean_size=statistics.fmean(sizes),
        num_over_cap=num_over_cap,
    )


def time_of_rows(rows: Rows, *, samples: SizedBatch, objective: str) -> int:
    """Time of rows in which a sample's size is the number of ranks that hold it.

    Under `step` the fullest rank's work: waiting inside groups, of which these rows have some, is not counted.
    """
    rank_costs = np.zeros((len(rows), samples.dp_cp_size), dtype=np.int64)
    for row, ranks in enumerate(rows):
        sizes = Counter(sample for ids in ranks for sample in ids)
        costs = {sample: int(samples.costs[size.bit_length() - 1, sample]) for sample, size in sizes.items()}
        rank_costs[row] = [sum(costs[sample] for sample in ids) for ids in ranks]
    return int(rank_costs.sum(axis=0).max() if objective == "step" else rank_costs.max(axis=1).sum())


def measure_time(
    batch: NDArray[np.int64], *, setup: DynamicSetup, exchange: float, announce: Callable[[str], None]
) -> list[PlanningTime]:
    """Times both objectives, five plans each after one that warms caches."""
    times: list[PlanningTime] = []
    for objective in OBJECTIVES:
        schedule = plan(batch, setup=setup, exchange=exchange, objective=objective)
        timings = [
            timed(lambda kind=objective: plan(batch, setup=setup, exchange=exchange, objective=kind))[1]
            for _ in range(5)
        ]
        over_bound = schedule.predicted_cost / schedule.lower_bound
        times.append(PlanningTime(setup.name, objective, statistics.median(timings), over_bound))
        announce(f"{setup.name}, {objective}: {times[-1].cpu_ms:.0f} ms")
    return times
