"""One row of the results: one way of planning, on the global batches of one setup."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from plan_judge import figures_of_ranks

from benchmarks.planner.baselines import BASELINES, Ranks
from benchmarks.planner.setups import Setup
from megatron_balance.planner import Assignment, ScheduleMetrics

REPEATED_BELOW_SECONDS = 0.25
"""Plans quicker than this are made three times: the median of their times is less noisy."""

SLOWEST_ROW_SECONDS = 30.0
"""A row stops after the batch with which it has planned this long, and says on how many it was measured."""

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Row:
    setup: str
    planner: str
    note: str
    num_batches: int = 0
    num_failed: int = 0
    mean_over_bound: float | None = None
    max_over_bound: float | None = None
    num_over_cap: int | None = None
    num_microbatches: int | None = None
    plan_cpu_ms: float | None = None


def timed(function: Callable[[], _Result]) -> tuple[_Result, float]:
    """Calls a function once. Returns its result and its CPU milliseconds.

    What earlier calls left to collect is collected first, so that nobody pays for another's garbage.
    """
    gc.collect()
    start = time.process_time()
    return function(), (time.process_time() - start) * 1e3


def measure_row(planner: str, *, setup: Setup, batches: list[NDArray[np.int64]]) -> Row:
    """Plans every batch and judges the plans by the setup's cost model and objective."""
    baseline = BASELINES[planner]

    def plan(batch: NDArray[np.int64]) -> tuple[Ranks, float]:
        return timed(lambda: baseline(batch, setup))

    try:
        # The first call pays for imports and for caches that a training run fills once.
        plan(batches[0][: 4 * setup.topology.dp_size])
    except ImportError:
        return Row(setup.name, planner, "not installed")
    except (ValueError, RuntimeError, AssertionError):
        pass  # A planner may refuse so few samples; the measured batches tell.
    # Imports leave a million objects: without them collections take no part of a plan's time.
    gc.freeze()

    plans: list[ScheduleMetrics] = []
    times: list[float] = []
    errors: list[str] = []
    for batch in batches:
        try:
            ranks, cpu_ms = plan(batch)
        except (ValueError, RuntimeError, AssertionError) as error:
            errors.append(type(error).__name__)
            continue
        if cpu_ms < REPEATED_BELOW_SECONDS * 1e3:
            cpu_ms = statistics.median([cpu_ms, plan(batch)[1], plan(batch)[1]])
        times.append(cpu_ms)
        plans.append(judged(ranks, batch=batch, setup=setup))
        if sum(times) > SLOWEST_ROW_SECONDS * 1e3:
            break

    notes = [f"{name} on {errors.count(name)} of {len(batches)}" for name in sorted(set(errors))]
    if len(plans) + len(errors) < len(batches):
        notes.append(f"first {len(plans)} of {len(batches)} batches")
    if not plans:
        return Row(setup.name, planner, "; ".join(notes), num_failed=len(errors))
    ratios = [metrics.over_bound for metrics in plans]
    return Row(
        setup.name,
        planner,
        "; ".join(notes),
        num_batches=len(plans),
        num_failed=len(errors),
        mean_over_bound=statistics.fmean(ratios),
        max_over_bound=max(ratios),
        num_over_cap=sum(metrics.num_over_cap for metrics in plans),
        num_microbatches=sum(metrics.num_microbatches for metrics in plans) * setup.topology.dp_size,
        plan_cpu_ms=statistics.median(times),
    )


def judged(plan: Ranks | Assignment, *, batch: NDArray[np.int64], setup: Setup) -> ScheduleMetrics:
    """Figures of a plan, by the setup's cost model where it has none of its own."""
    if isinstance(plan, Assignment):
        return plan.metrics()
    options = {"cost_model": setup.cost_model, "topology": setup.topology, "limits": setup.limits}
    return figures_of_ranks(plan, batch.tolist(), objective=setup.objective, **options)
