"""A recorded run reads back as it was, also where it was cut short."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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


def write(folder: Path, *, num_steps: int, info: RunInfo = INFO) -> list[StepRecord]:
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
        step.seconds[step.cp_size_grid == 0] = 0.0
        for rank, writer in enumerate(ranks):
            writer.add(step.iteration, seconds=step.seconds[rank][step.cp_size_grid[rank] > 0])
    return steps


def assert_same(ours: StepRecord, theirs: StepRecord) -> None:
    for field in fields(StepRecord):
        both = getattr(ours, field.name), getattr(theirs, field.name)
        if field.name == "seconds":  # nine digits are written
            np.testing.assert_allclose(*both, rtol=1e-8)
        else:
            np.testing.assert_array_equal(*both, err_msg=field.name)


@pytest.mark.parametrize("info", [INFO, DYNAMIC], ids=["one size", "sizes of micro-batches"])
@pytest.mark.parametrize("num_steps", [1, 9])
def test_what_was_written_reads_back(tmp_path: Path, num_steps: int, info: RunInfo) -> None:
    steps = write(tmp_path, num_steps=num_steps, info=info)
    record = read_record(tmp_path)
    assert record.info == info
    for index, (ours, theirs) in enumerate(zip(record.steps, steps, strict=True)):
        assert_same(ours, theirs)
        planned = plan(index % NUM_PLANS, info)
        np.testing.assert_array_equal(ours.lengths, planned.lengths)
        np.testing.assert_array_equal(ours.cp_size_grid, planned.cp_size_grid)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda sizes: sizes[:-1], "entries; there must be"),
        (lambda sizes: [float(size) for size in sizes], "must be an integer"),
        (lambda sizes: [3 if size == 2 else size for size in sizes], "none of"),
        (
            lambda sizes: [1 if i == np.argmax(np.array(sizes) > 1) else size for i, size in enumerate(sizes)],
            "not whole",
        ),
        (lambda sizes: [0, *sizes[1:]], "or a gap"),
        (lambda sizes: [0] * len(sizes), "not on the first leaf"),
        (lambda sizes: None, "has no cp_sizes"),
    ],
)
def test_sizes_that_cannot_be_are_refused(tmp_path: Path, wrong: Callable[[Any], Any], error: str) -> None:
    write(tmp_path, num_steps=1, info=DYNAMIC)
    path = tmp_path / "plan.jsonl"
    run, step = map(json.loads, path.read_text().splitlines())
    step["cp_sizes"] = wrong(step["cp_sizes"])
    if step["cp_sizes"] is None:
        del step["cp_sizes"]
    path.write_text(f"{json.dumps(run)}\n{json.dumps(step)}\n")
    with pytest.raises(BalanceError, match=error):
        read_record(tmp_path)


def test_a_killed_run_loses_at_most_its_last_line(tmp_path: Path) -> None:
    """SIGKILL in the middle of writing, many times: every step that `add` returned for is read back."""
    script = (
        "import sys, numpy as np; from test_record import write, plan, INFO, PlanWriter, StepRecord\n"
        "from pathlib import Path\n"
        "writer, step = PlanWriter(Path(sys.argv[1]), info=INFO), plan(1)\n"
        "for iteration in range(1, 10**9):\n"
        "    writer.add(StepRecord.of_schedule(step, iteration=iteration)); print(iteration, flush=True)\n"
    )
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    }
    for attempt, until in enumerate((1, 7, 30)):
        folder = tmp_path / str(attempt)
        command = [sys.executable, "-c", script, str(folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if int(line) == until:
                    process.kill()
                    break
            confirmed = max([until, *map(int, process.stdout.read().split("\n")[:-1])])
        iterations = [step.iteration for step in read_record(folder).steps]
        assert iterations[:confirmed] == list(range(1, confirmed + 1))
        assert len(iterations) <= confirmed + 1


def test_the_beginning_of_a_line_is_left_out_and_written_over(tmp_path: Path) -> None:
    steps = write(tmp_path, num_steps=4)
    for path in tmp_path.glob("*.jsonl"):
        path.write_bytes(path.read_bytes()[:-20])
    record = read_record(tmp_path)
    assert [step.iteration for step in record.steps] == [1, 2, 3]
    assert_same(record.steps[-1], steps[2])
    PlanWriter(tmp_path, info=INFO, resume=True).add(steps[3])
    for rank in range(len(steps[3].seconds)):
        SecondsWriter(tmp_path, dp_rank=rank, resume=True).add(4, seconds=steps[3].seconds[rank])
    assert_same(read_record(tmp_path).steps[3], steps[3])
    (tmp_path / "seconds_rank00002.jsonl").unlink()
    assert [np.isnan(rank).all() for rank in read_record(tmp_path).steps[1].seconds] == [False, False, True, False]


def test_a_folder_without_a_record_is_named(tmp_path: Path) -> None:
    with pytest.raises(BalanceError, match="is no record of a run"):
        read_record(tmp_path)
    (tmp_path / "plan.jsonl").write_text('{"kind": "run", "format": "megatron_balance record 1"}\n')
    with pytest.raises(BalanceError, match="not 'megatron_balance record 2': another version wrote it"):
        read_record(tmp_path)


def test_a_resumed_run_goes_on_with_the_record_and_a_new_one_replaces_it(tmp_path: Path) -> None:
    def write_steps(first: int, *, num_steps: int, resume: bool) -> None:
        plans = PlanWriter(tmp_path, info=INFO, resume=resume)
        rank = SecondsWriter(tmp_path, dp_rank=0, resume=resume)
        for step in range(first, first + num_steps):
            record = StepRecord.of_schedule(plan(step), iteration=step, plan_seconds=float(first))
            plans.add(record)
            rank.add(step, seconds=np.full(record.num_microbatches, float(first)))

    write_steps(1, num_steps=5, resume=False)
    write_steps(4, num_steps=4, resume=True)  # from the checkpoint after step 3
    steps = read_record(tmp_path).steps
    assert [step.iteration for step in steps] == [1, 2, 3, 4, 5, 6, 7]
    assert [step.plan_seconds for step in steps] == [1, 1, 1, 4, 4, 4, 4]
    assert [step.seconds[0, 0] for step in steps] == [1, 1, 1, 4, 4, 4, 4]
    write_steps(1, num_steps=2, resume=False)
    assert [step.iteration for step in read_record(tmp_path).steps] == [1, 2]


def test_what_other_ranks_recorded_before_a_resume_is_a_record_of_its_own(tmp_path: Path) -> None:
    two = replace(INFO, topology=Topology(2, cp_size=2, pp_size=2))
    for first, info in ((1, INFO), (3, INFO), (5, two), (7, two)):
        plans = PlanWriter(tmp_path, info=info, resume=True)
        ranks = [SecondsWriter(tmp_path, dp_rank=rank, resume=True) for rank in range(info.topology.dp_size)]
        for iteration in (first, first + 1):
            step = StepRecord.of_schedule(plan(iteration, info), iteration=iteration)
            plans.add(step)
            for rank in ranks:
                rank.add(iteration, seconds=np.full(step.num_microbatches, float(first)))
    for folder, info, iterations in ((tmp_path, two, [5, 6, 7, 8]), (tmp_path / "earlier_0", INFO, [1, 2, 3, 4])):
        record = read_record(folder)
        assert record.info == info
        assert [step.iteration for step in record.steps] == iterations
        assert not any(np.isnan(step.seconds).any() for step in record.steps)
