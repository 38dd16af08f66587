"""Recorded runs for the tests of reports and comparisons: planned for real, their seconds made up."""

import contextlib
import time
from dataclasses import replace

import numpy as np
import pytest

from megatron_balance import CostModel, Limits, Topology, build_data_schedule
from megatron_balance.record import RecordWriter, RunInfo, StepRecord, line_of, seconds_line

COST_MODEL = CostModel(linear=2000, quadratic=1)


def run_info(topology=None, **changes):
    info = RunInfo(
        topology=topology or Topology(4),
        limits=Limits(8192),
        cost_model=COST_MODEL,
        cost_name="flops",
        objective="step",
        policy="--balance-data --balance-by-flops",
        environment={"device": "a test", "clock": "a made-up clock", "versions": {"torch": "2"}},
    )
    return replace(info, **changes)


def step_of(info, lengths, **options):
    """The first step of a run, planned from these lengths."""
    shared = {"cost_model": info.cost_model, "topology": info.topology, "limits": info.limits}
    schedule = build_data_schedule(lengths, objective=info.objective, **shared, **options)
    return StepRecord.from_schedule(schedule, iteration=1)


class PatientWriter(RecordWriter):
    """Adds no line before the last one was taken: none is dropped."""

    def __init__(self, folder, *, rank, resume=False):
        self.rank = rank
        super().__init__(folder, rank=rank, writes_plans=rank == 0, resume=resume, warn=pytest.fail)

    def add(self, line):
        super().add(line)
        while not self._waiting.empty():
            time.sleep(0)

    def add_step(self, step):
        self.add(line_of(step))

    def add_seconds(self, iteration, *, seconds):
        self.add(seconds_line(iteration, rank=self.rank, seconds=seconds))


@contextlib.contextmanager
def record_writers(folder, info, *, num_ranks, resume=False):
    """Those of all ranks, closed in the end."""
    with contextlib.ExitStack() as stack:
        writers = [PatientWriter(folder, rank=rank, resume=resume) for rank in range(num_ranks)]
        writers[0].add(info.line())
        for writer in writers:
            stack.callback(writer.close)
        yield writers


def planned_step(info, *, iteration, num_samples, most_segments=1):
    """Every rank has loaded neighbours, not every so many-th sample as Megatron's sampler gives them."""
    rng = np.random.default_rng(iteration)
    num_segments = rng.integers(0, most_segments, num_samples, endpoint=True) if most_segments > 1 else None
    num_lengths = num_samples if num_segments is None else num_segments.sum()
    schedule = build_data_schedule(
        np.clip(rng.lognormal(6.5, 1.1, num_lengths).astype(np.int64), 16, 7900),
        num_segments=num_segments,
        cost_model=info.cost_model,
        topology=info.topology,
        limits=info.limits,
        objective=info.objective,
        home_ranks=np.sort(np.arange(num_samples) % info.topology.dp_size),
    )
    return StepRecord.from_schedule(schedule, iteration=iteration, plan_seconds=0.004, exchange_seconds=0.01)


def write_record(
    folder, info=None, *, num_steps=6, num_samples=48, measured=True, noise=0.05, num_plans=None, most_segments=1
):
    """As a training run writes it. Every micro-batch took a nanosecond a unit of cost, but for noise.

    With `num_plans` the steps repeat as many plans and are measured anew.
    """
    info = info or run_info()
    plans = [
        planned_step(info, iteration=index + 1, num_samples=num_samples, most_segments=most_segments)
        for index in range(num_plans or num_steps)
    ]
    steps = []
    for index in range(num_steps):
        step = replace(plans[index % len(plans)], iteration=index + 1)
        factors = 1 + noise * np.random.default_rng(index).uniform(-1, 1, step.costs.shape)
        steps.append(replace(step, seconds=(step.costs * 1e-9 * factors).astype(np.float32)))
    with record_writers(folder, info, num_ranks=len(steps[0].costs)) as ranks:
        for step in steps:
            ranks[0].add_step(step)
            for rank, seconds in enumerate(step.seconds if measured else ()):
                ranks[rank].add_seconds(step.iteration, seconds=seconds[step.cp_size_grid[rank] > 0])
    return steps
