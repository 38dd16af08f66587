"""Recorded runs for the tests of the report: planned for real, their seconds made up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_balance import CostModel, Limits, Topology, build_data_schedule
from megatron_balance.planner.objectives import resolve_objective
from megatron_balance.record.run_record import RunInfo, RunRecord
from megatron_balance.record.step import StepRecord

SECONDS_PER_COST = 1e-9
COST_MODEL = CostModel(linear=2000, quadratic=1)


def run_info(topology: Topology | None = None, **changes: object) -> RunInfo:
    topology = topology or Topology(4)
    info = RunInfo(
        topology=topology,
        limits=Limits(8192),
        cost_model=COST_MODEL,
        cost_name="flops",
        objective=resolve_objective("auto", topology=topology),
        policy="--balance-data --balance-by-flops",
        origin={"device": "a test's <device>", "clock": "a made-up clock", "versions": {"torch": "2"}},
    )
    return replace(info, **changes)


def planned_step(info: RunInfo, *, iteration: int, num_samples: int, seed: int) -> StepRecord:
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(6.5, 1.1, num_samples).astype(np.int64), 16, 7900)
    schedule = build_data_schedule(
        lengths,
        cost_model=info.cost_model,
        topology=info.topology,
        limits=info.limits,
        objective=info.objective,
        home_ranks=np.arange(num_samples) % info.topology.dp_size,
    )
    return StepRecord.of_schedule(schedule, iteration=iteration, plan_seconds=0.004, exchange_seconds=0.01)


def measured(step: StepRecord, *, noise: float = 0.05, seconds_per_cost: float = SECONDS_PER_COST) -> StepRecord:
    """Every micro-batch took what it was predicted to, but for noise."""
    rng = np.random.default_rng(step.iteration)
    factors = 1 + noise * rng.uniform(-1, 1, step.cost_grid.shape)
    return replace(step, seconds=step.cost_grid * 2.0**step.cost_shift * seconds_per_cost * factors)


def run_record(
    info: RunInfo | None = None, *, num_steps: int = 6, num_samples: int = 48, noise: float = 0.05
) -> RunRecord:
    info = info or run_info()
    steps = [planned_step(info, iteration=index + 1, num_samples=num_samples, seed=index) for index in range(num_steps)]
    return RunRecord(info, tuple(measured(step, noise=noise) for step in steps))


def large_record(*, num_steps: int = 1000, num_ranks: int = 64) -> RunRecord:
    """As many steps as asked, twenty of them planned; those that repeat are measured anew."""
    info = run_info(Topology(num_ranks))
    plans = [planned_step(info, iteration=0, num_samples=num_ranks * 8, seed=index) for index in range(20)]
    steps = [measured(replace(plans[index % 20], iteration=index + 1)) for index in range(num_steps)]
    return RunRecord(info, tuple(steps))


def unmeasured(record: RunRecord) -> RunRecord:
    return RunRecord(
        record.info, tuple(replace(step, seconds=np.full(step.seconds.shape, np.nan)) for step in record.steps)
    )
