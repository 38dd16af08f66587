"""A recorded run reads back as it was, also where it was cut short."""

import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from recorded_runs import planned_step, record_writers, run_info, step_of, write_record

from megatron_balance import BalanceError, CostModel, Forest, Topology
from megatron_balance.record import RecordWriter, StepRecord, read_record, seconds_line
from megatron_balance.record.writing import MAX_WAITING
from megatron_balance.report import run_figures

INFO = run_info(
    Topology(4, cp_size=2, pp_size=2),
    cost_model=CostModel(linear=1000, quadratic=3, windows=((128, 7),)),
    objective="pipeline",
)
DYNAMIC = run_info(Topology(3, cp_size=2, dynamic_cp=True))


def write_steps(folder, info, *, first, num_steps, resume):
    """As a run started at step `first` writes them; its seconds are all `first`, which tells runs apart."""
    with record_writers(folder, info, num_ranks=info.topology.dp_size, resume=resume) as ranks:
        for iteration in range(first, first + num_steps):
            step = planned_step(info, iteration=iteration, num_samples=20 + iteration)
            ranks[0].add_step(replace(step, plan_seconds=float(first)))
            for rank in ranks:
                rank.add_seconds(iteration, seconds=np.full(step.num_microbatches, float(first)))


def assert_same(ours, theirs):
    for field in fields(StepRecord):
        both = getattr(ours, field.name), getattr(theirs, field.name)
        if field.name == "seconds":  # nine digits are written
            np.testing.assert_allclose(*both, rtol=1e-8)
        else:
            np.testing.assert_array_equal(*both, err_msg=field.name)


@pytest.mark.parametrize("info", [INFO, DYNAMIC], ids=["one size", "sizes of micro-batches"])
def test_what_was_written_reads_back(tmp_path, info):
    steps = write_record(tmp_path, info, num_samples=21, most_segments=3)
    record = read_record(tmp_path)
    assert record.info == info
    for ours, theirs in zip(record.steps, steps, strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize(
    ("name", "tokens", "times"),
    [
        # Written by 0.1, which printed 1.62x.
        ("0.1.jsonl", 13_263, [559699433846480, 344984667887632]),
        # By a training run of 0.2, three steps on four CPU ranks; and by its compare, with dynamic sizes, PP2 and EP2.
        ("0.2", 79_031, [1.197282327, 0.863948988, 0.879485796]),
        ("0.2-dynamic.jsonl", 260_746, [3135635501088768, 2161796938465280]),
    ],
)
def test_records_of_earlier_releases_are_read(name, tokens, times):
    """Committed as they were written. They stay, and so do their figures: under stock, as planned, and as measured."""
    figures = run_figures(read_record(Path(__file__).parent / "records" / name))
    assert sum(int(step.lengths.sum()) for step in figures.record.steps) == tokens
    assert [policy.times.sum() for policy in figures.policies.values()] == pytest.approx(times)


def test_a_record_of_another_format_has_a_remedy(tmp_path):
    line = json.dumps(INFO.line()).replace("record 4", "record 5")
    (tmp_path / "plan.jsonl").write_text(f"{line}\n")
    with pytest.raises(BalanceError, match=r"record 5'.*install the version that wrote it, or record 20"):
        read_record(tmp_path)


def test_images_count_when_a_record_is_read(tmp_path):
    info = run_info(cost_model=CostModel(linear=1, image_linear=5, image_quadratic=1))
    written = step_of(info, [100, 200, 300, 400], image_patches=[[], [16], [4, 64], [1]])
    with record_writers(tmp_path, info, num_ranks=1) as (writer,):
        writer.add_step(written)
    (step,) = read_record(tmp_path).steps
    np.testing.assert_array_equal(step.costs, written.costs)
    assert step.costs.sum() == 1000 + 5 * 85 + 16**2 + 4**2 + 64**2 + 1


def test_what_samples_share_counts_when_a_record_is_read(tmp_path):
    """Stock shares nothing."""
    info, lengths = run_info(cost_model=CostModel(linear=1)), [70, 50, 40, 30]
    forest = Forest.from_prompts(lengths, prompt_tokens=[30, 30, 0, 30], groups=[0, 0, 1, 0])
    written = step_of(info, lengths, forest=forest)
    with record_writers(tmp_path, info, num_ranks=1) as (writer,):
        writer.add_step(written)
    (step,) = read_record(tmp_path).steps
    np.testing.assert_array_equal(step.costs, written.costs)
    assert step.metrics().computed_tokens == written.metrics().computed_tokens
    assert step.stock().costs.sum() == 190


def test_a_killed_run_loses_at_most_its_last_line(tmp_path):
    """SIGKILL in the middle of writing, many times: every step that was taken before the last is read back."""
    script = (
        "import sys; from test_record import INFO, planned_step, replace; from recorded_runs import PatientWriter\n"
        "from pathlib import Path\n"
        "writer = PatientWriter(Path(sys.argv[1]), rank=0); writer.add(INFO.line())\n"
        "step = planned_step(INFO, iteration=1, num_samples=20)\n"
        "for iteration in range(1, 10**9):\n"
        "    writer.add_step(replace(step, iteration=iteration)); print(iteration - 1, flush=True)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
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
        assert len(iterations) <= confirmed + 2


def test_lines_that_a_disk_does_not_take_are_dropped_and_counted(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "seconds_rank00001.jsonl")  # nobody reads it: who opens it hangs
    warnings = []
    writer = RecordWriter(tmp_path, rank=1, writes_plans=False, resume=False, warn=warnings.append)
    for iteration in range(MAX_WAITING + 4):
        writer.add(seconds_line(iteration, rank=1, seconds=np.zeros(2)))
    assert writer.num_dropped == 4
    monkeypatch.setattr("megatron_balance.record.writing.CLOSE_SECONDS", 0.01)
    writer.close()
    assert [warning.split(":")[0] for warning in warnings] == [
        f"{MAX_WAITING} lines of the record wait for its disk",
        f"{MAX_WAITING + 4} lines of the record were not written",
    ]


def test_the_beginning_of_a_line_is_left_out_and_written_over(tmp_path):
    steps = write_record(tmp_path, INFO, num_steps=4)
    for path in tmp_path.glob("*.jsonl"):
        path.write_bytes(path.read_bytes()[:-20])
    record = read_record(tmp_path)
    assert [step.iteration for step in record.steps] == [1, 2, 3]
    assert_same(record.steps[-1], steps[2])
    with record_writers(tmp_path, INFO, num_ranks=len(steps[3].seconds), resume=True) as ranks:
        for rank, seconds in zip(ranks, steps[3].seconds, strict=True):
            rank.add_seconds(4, seconds=seconds)
        ranks[0].add_step(steps[3])
    assert_same(read_record(tmp_path).steps[3], steps[3])
    (tmp_path / "seconds_rank00002.jsonl").unlink()
    assert [np.isnan(rank).all() for rank in read_record(tmp_path).steps[1].seconds] == [False, False, True, False]


def test_a_resumed_run_goes_on_with_the_record_and_a_new_one_replaces_it(tmp_path):
    write_steps(tmp_path, INFO, first=1, num_steps=5, resume=False)
    write_steps(tmp_path, INFO, first=4, num_steps=4, resume=True)  # from the checkpoint after step 3
    steps = read_record(tmp_path).steps
    assert [step.iteration for step in steps] == [1, 2, 3, 4, 5, 6, 7]
    assert [step.plan_seconds for step in steps] == [1, 1, 1, 4, 4, 4, 4]
    assert [step.seconds[0, 0] for step in steps] == [1, 1, 1, 4, 4, 4, 4]
    write_steps(tmp_path, INFO, first=1, num_steps=2, resume=False)
    assert [step.iteration for step in read_record(tmp_path).steps] == [1, 2]


def test_what_other_ranks_recorded_before_a_resume_is_not_read(tmp_path):
    two = run_info(Topology(2, cp_size=2, pp_size=2))
    for first, info in ((1, INFO), (3, INFO), (4, two), (6, two)):
        write_steps(tmp_path, info, first=first, num_steps=2, resume=True)
    record = read_record(tmp_path)
    assert record.info == two
    assert [step.iteration for step in record.steps] == [4, 5, 6, 7]
    assert [step.seconds[0, 0] for step in record.steps] == [4, 4, 6, 6]
