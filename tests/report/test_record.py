"""A recorded run reads back as it was, also where it was cut short."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_balance import BalanceError, CostModel, DataSchedule, Limits, Topology, build_data_schedule
from megatron_balance.record import PlanWriter, RunInfo, SecondsWriter, StepRecord, read_record

INFO = RunInfo(
    topology=Topology(4, cp_size=2, pp_size=2),
    limits=Limits(4096),
    cost_model=CostModel(linear=1000, quadratic=3, windows=((128, 7),)),
    cost_name="flops",
    objective="pipeline",
    policy="--balance-data --balance-by-flops",
    origin={"device": "a test"},
)

CHUNK_STEPS = 64
"""Steps of a file."""

NUM_PLANS = 5
DYNAMIC = replace(INFO, topology=Topology(3, cp_size=2, dynamic_cp=True), objective="step")


def plan(step: int, info: RunInfo = INFO) -> DataSchedule:
    """Another number of samples, sequences and micro-batches in every step."""
    rng = np.random.default_rng(step)
    num_segments = rng.integers(0, 4, 20 + step % 7)
    num_segments[0] = 1
    return build_data_schedule(
        rng.integers(1, 3000, num_segments.sum()),
        num_segments=num_segments,
        cost_model=info.cost_model,
        topology=info.topology,
        limits=info.limits,
        home_ranks=rng.integers(0, info.topology.dp_size, num_segments.size),
    )


def write(folder: Path, *, num_steps: int, flush: bool = True, info: RunInfo = INFO) -> list[StepRecord]:
    plans = PlanWriter(folder, info=info)
    planned = [plan(step, info) for step in range(NUM_PLANS)]
    steps = [
        StepRecord.of_schedule(
            planned[step % NUM_PLANS], iteration=step + 1, plan_seconds=0.001 * step, exchange_seconds=0.5
        )
        for step in range(num_steps)
    ]
    ranks = [SecondsWriter(folder, dp_rank=rank) for rank in range(len(steps[0].seconds))]
    for step in steps:
        plans.add(step)
        step.seconds[:] = np.random.default_rng(step.iteration).random(step.seconds.shape).astype(np.float32)
        if step.cp_sizes is not None:
            step.seconds[step.cp_sizes == 0] = 0.0
        for rank, writer in enumerate(ranks):
            there = slice(None) if step.cp_sizes is None else step.cp_sizes[rank] > 0
            writer.add(step.iteration, seconds=step.seconds[rank][there])
    if flush:
        plans.flush()
        for writer in ranks:
            writer.flush()
    return steps


def assert_same(ours: StepRecord, theirs: StepRecord) -> None:
    for field in fields(StepRecord):
        np.testing.assert_array_equal(getattr(ours, field.name), getattr(theirs, field.name), err_msg=field.name)


@pytest.mark.parametrize("info", [INFO, DYNAMIC], ids=["one size", "sizes of micro-batches"])
@pytest.mark.parametrize("num_steps", [1, CHUNK_STEPS + 3])
def test_what_was_written_reads_back(tmp_path: Path, num_steps: int, info: RunInfo) -> None:
    steps = write(tmp_path, num_steps=num_steps, info=info)
    record = read_record(tmp_path)
    assert record.info == info
    for index, (ours, theirs) in enumerate(zip(record.steps, steps, strict=True)):
        assert_same(ours, theirs)
        planned = plan(index % NUM_PLANS, info)
        np.testing.assert_array_equal(ours.lengths, planned.lengths)
        if ours.cp_sizes is not None:
            sizes = [[size for size in sizes if size] for sizes in ours.cp_sizes.tolist()]
            assert sizes == [list(sizes) for sizes in planned.cp_sizes]


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda sizes: sizes[:-1], "values are cut by sizes"),
        (lambda sizes: sizes.astype(np.float64), "must be int64"),
        (lambda sizes: np.where(sizes == 2, 3, sizes), "none of"),
        (lambda sizes: np.where(np.arange(sizes.size) == np.argmax(sizes > 1), 1, sizes), "not whole"),
        (lambda sizes: np.where(np.arange(sizes.size) == 0, 0, sizes), "or a gap"),
        (lambda sizes: np.zeros_like(sizes), "not on the first leaf"),
    ],
)
def test_sizes_that_cannot_be_are_refused(tmp_path: Path, wrong: Callable[[Any], Any], error: str) -> None:
    write(tmp_path, num_steps=1, info=DYNAMIC)
    (path,) = tmp_path.glob("plans_*.npz")
    with np.load(path) as chunk:
        arrays = dict(chunk)
    np.savez(path, **{**arrays, "cp_sizes": wrong(arrays["cp_sizes"])})
    with pytest.raises(BalanceError, match=error):
        read_record(tmp_path)
    del arrays["cp_sizes"]
    np.savez(path, **arrays)
    with pytest.raises(BalanceError, match="has no cp_sizes"):
        read_record(tmp_path)


def test_a_run_that_was_killed_leaves_its_whole_chunks(tmp_path: Path) -> None:
    steps = write(tmp_path, num_steps=CHUNK_STEPS + 3, flush=False)
    record = read_record(tmp_path)
    assert [step.iteration for step in record.steps] == list(range(1, CHUNK_STEPS + 1))
    assert_same(record.steps[-1], steps[CHUNK_STEPS - 1])


def test_what_was_not_measured_is_nan(tmp_path: Path) -> None:
    write(tmp_path, num_steps=2)
    (tmp_path / "seconds_rank00002_00000.npz").unlink()
    seconds = read_record(tmp_path).steps[1].seconds
    assert np.isnan(seconds[2]).all()
    assert not np.isnan(seconds[[0, 1, 3]]).any()


def test_a_folder_without_a_record_is_named(tmp_path: Path) -> None:
    with pytest.raises(BalanceError, match="is no record of a run"):
        read_record(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(BalanceError, match="is not of the format 'megatron_balance record 1'"):
        read_record(tmp_path)


def test_a_resumed_run_goes_on_with_the_record_and_a_new_one_replaces_it(tmp_path: Path) -> None:
    def write_steps(first: int, *, num_steps: int, resume: bool) -> None:
        plans = PlanWriter(tmp_path, info=INFO, resume=resume)
        rank = SecondsWriter(tmp_path, dp_rank=0, resume=resume)
        for step in range(first, first + num_steps):
            record = StepRecord.of_schedule(plan(step), iteration=step, plan_seconds=float(first))
            plans.add(record)
            rank.add(step, seconds=np.full(record.num_microbatches, float(first)))
        plans.flush()
        rank.flush()

    write_steps(1, num_steps=5, resume=False)
    write_steps(4, num_steps=4, resume=True)  # from the checkpoint after step 3
    steps = read_record(tmp_path).steps
    assert [step.iteration for step in steps] == [1, 2, 3, 4, 5, 6, 7]
    assert [step.plan_seconds for step in steps] == [1, 1, 1, 4, 4, 4, 4]
    assert [step.seconds[0, 0] for step in steps] == [1, 1, 1, 4, 4, 4, 4]
    write_steps(1, num_steps=2, resume=False)
    assert [step.iteration for step in read_record(tmp_path).steps] == [1, 2]


def test_what_other_ranks_recorded_before_a_resume_is_a_record_of_its_own(tmp_path: Path) -> None:
    four, two = INFO, replace(INFO, topology=Topology(2, cp_size=2, pp_size=2))
    for info in (four, four, two, two):
        PlanWriter(tmp_path, info=info, resume=True).flush()
        (tmp_path / f"plans_{len(list(tmp_path.glob('plans_*')))}.npz").touch()
    assert RunInfo.read(tmp_path).topology == two.topology
    assert RunInfo.read(tmp_path / "earlier_0").topology == four.topology
    assert len(list(tmp_path.glob("earlier_0/plans_*.npz"))) == len(list(tmp_path.glob("plans_*.npz"))) == 2
