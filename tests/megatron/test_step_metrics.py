"""Log lines, scalars and the record of a training run: real `pretrain()` runs."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked_runs
import numpy as np
import pytest
import torch.distributed as dist
from training_run import Recorded, RunFailed, train

from megatron_balance import CostModel, Limits, Topology, build_data_schedule
from megatron_balance.mcore.setup.run_log import RunLog
from megatron_balance.mcore.step.balanced_step import BalancedStep
from megatron_balance.mcore.telemetry import run_metrics
from megatron_balance.mcore.telemetry.figures import Figures
from megatron_balance.mcore.telemetry.observer import TimedStep
from megatron_balance.mcore.telemetry.recording import RunRecording
from megatron_balance.mcore.telemetry.run_metrics import RunMetrics
from megatron_balance.planner.metrics import schedule_metrics
from megatron_balance.record.run_record import RunRecord, read_record
from megatron_balance.runtime.peers import PeerError
from megatron_balance.runtime.rank_seconds import busiest_over_mean

FLAGS = (
    "--hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64 --seq-length 512 "
    "--max-position-embeddings 512 --global-batch-size 16 --ckpt-format torch --use-dynamic-batch-size "
    "--max-tokens-per-gpu 1024 --balance-data --balance-by-flops"
)
NUM_STEPS = 7
SAVED_AT = 4
LINE = re.compile(
    r"megatron_balance: iteration (?P<iteration>\d+) \| (?P<objective>\w+) \| max/mean of rank time: "
    r"planned (?P<planned>[\d.]+), measured (?P<measured>[\d.]+) \(busiest rank (?P<busiest>[\d.]+) ms\) .*"
    r"micro-batches (?P<slots>[\d.]+) \((?P<shapes>\d+) shapes so far\) "
    r".*padding .*moved .*plan .*exchange .*exposed (?P<exposed>[\d.]+) ms$",
    re.MULTILINE,
)
PLANNED_NAMES = {
    "planned_imbalance",
    "over_bound",
    "num_microbatches",
    "padding_fraction",
    "moved_fraction",
    "moved_fraction_unlabelled",
    "plan_seconds",
    "exchange_seconds",
    "exposed_seconds",
}
NAMES = {*PLANNED_NAMES, "num_shapes", "measured_imbalance", "busiest_rank_seconds"}


def run(folder: Path, flags: str, *, num_ranks: int = 2) -> Recorded:
    return forked_runs.train(folder, f"{FLAGS} {flags}".split(), num_ranks=num_ranks)


def scalars(folder: Path, *, rank: int) -> dict[str, dict[int, float]]:
    """The balance scalars of the only writer: name, then iteration, then value."""
    [path] = folder.iterdir()
    assert path.name == f"rank{rank}.jsonl"
    written: dict[str, dict[int, float]] = {}
    for row in map(json.loads, path.read_text().splitlines()):
        if row["name"].startswith("balance/"):
            written.setdefault(row["name"].removeprefix("balance/"), {})[row["step"]] = row["value"]
    return written


def step_imbalance(record: RunRecord, *, iterations: range) -> float:
    ranks = [step.cost_grid.sum(axis=1) for step in record.steps if step.iteration in iterations]
    return float(np.mean([of_step.max() / of_step.mean() for of_step in ranks]))


@dataclass(frozen=True)
class Whole:
    """A run with everything on: evaluation between steps, look-ahead, checkpoints, a record, both writers."""

    folder: Path
    recorded: Recorded

    @property
    def record(self) -> RunRecord:
        return read_record(self.folder / "record")

    @property
    def lines(self) -> list[dict[str, str]]:
        return [match.groupdict() for match in LINE.finditer(self.recorded.output)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("whole")
    flags = (
        f"--num-layers 1 --train-iters {NUM_STEPS} --log-interval 3 --eval-interval 2 --eval-iters 1 "
        f"--balance-lookahead 2 --save {folder / 'checkpoints'} --save-interval {SAVED_AT} "
        f"--balance-record {folder / 'record'} --tensorboard-dir {folder / 'tensorboard'} "
        f"--wandb-project p --wandb-exp-name e --wandb-save-dir {folder}"
    )
    return Whole(folder, run(folder / "steps", flags))


class TestOneRun:
    def test_a_line_each_log_interval(self, whole: Whole) -> None:
        assert [line["iteration"] for line in whole.lines] == ["3", "6"]
        steps = whole.recorded.steps
        for line, iterations in zip(whole.lines, (range(1, 4), range(4, 7)), strict=True):
            assert line["objective"] == "step"
            slots = np.mean([steps[iteration - 1]["num_microbatches"] for iteration in iterations])
            assert float(line["slots"]) == pytest.approx(slots, rel=1e-3)
            tokens = [num_tokens for step in steps[: iterations[-1]] for num_tokens in step["microbatch_tokens"]]
            assert int(line["shapes"]) == len(set(tokens)) > 1
            planned = step_imbalance(whole.record, iterations=iterations)
            assert float(line["planned"]) == pytest.approx(planned, abs=1e-4)

    def test_what_was_measured_is_what_the_record_holds(self, whole: Whole) -> None:
        for line, first in zip(whole.lines, (0, 3), strict=True):
            seconds = np.stack([step.seconds.sum(axis=1) for step in whole.record.steps[first : first + 3]], axis=1)
            assert float(line["measured"]) == pytest.approx(busiest_over_mean(seconds), abs=2e-4)
            assert float(line["busiest"]) == pytest.approx(seconds.max(axis=0).mean() * 1e3, abs=0.1)

    def test_the_scalars_are_those_of_the_line(self, whole: Whole) -> None:
        written = scalars(whole.folder / "tensorboard", rank=1)
        assert set(written) == {*NAMES, "drift"}
        for line in whole.lines:
            iteration = int(line["iteration"])
            assert written["planned_imbalance"][iteration] == pytest.approx(float(line["planned"]), abs=1e-4)
            assert written["measured_imbalance"][iteration] == pytest.approx(float(line["measured"]), abs=1e-4)
            assert written["exposed_seconds"][iteration] * 1e3 == pytest.approx(float(line["exposed"]), abs=0.1)
        assert {tuple(of_name) for of_name in written.values()} == {(3, 6)}

    def test_wandb_is_told_the_same(self, whole: Whole) -> None:
        [path] = (whole.folder / "wandb").glob("offline-run-*/*.wandb")
        content = path.read_bytes()
        assert all(f"balance/{name}".encode() in content for name in NAMES)

    def test_the_record_is_what_ran(self, whole: Whole) -> None:
        record = whole.record
        assert [step.iteration for step in record.steps] == list(range(1, NUM_STEPS + 1))
        for ours, theirs in zip(record.steps, whole.recorded.steps, strict=True):
            assert ours.lengths.tolist() == theirs["lengths"]
            slots = [slot for slots in theirs["ranks"] for slot in slots]
            assert [np.flatnonzero(ours.slot_of == slot).tolist() for slot in range(len(slots))] == slots
            assert ours.exposed_seconds == theirs["exposed_seconds"]
            assert ours.seconds.shape == (2, theirs["num_microbatches"])
            assert (ours.seconds > 0).all()
        assert record.info.policy.startswith("--use-dynamic-batch-size --balance-data --balance-by-flops")
        assert (record.info.cost_name, record.info.objective) == ("flops", "step")
        assert "megatron-core" in record.info.origin["versions"]

    def test_the_record_is_whole_at_every_checkpoint(self, whole: Whole) -> None:
        files = sorted((whole.folder / "record").glob("*_00000.npz"))
        assert len(files) == 3
        assert all(np.load(file)["iteration"].tolist() == list(range(1, SAVED_AT + 1)) for file in files)


def test_a_resumed_run_goes_on_with_the_record(tmp_path: Path, whole: Whole) -> None:
    record, checkpoints = tmp_path / "record", tmp_path / "checkpoints"
    shutil.copytree(whole.folder / "record", record)
    shutil.copytree(whole.folder / "checkpoints", checkpoints)
    (checkpoints / "latest_checkpointed_iteration.txt").write_text(f"{SAVED_AT}")
    flags = f"--num-layers 1 --train-iters {NUM_STEPS} --log-interval {NUM_STEPS} --balance-lookahead 2"
    resumed = run(tmp_path / "steps", f"{flags} --load {checkpoints} --balance-record {record}")
    assert [match["iteration"] for match in LINE.finditer(resumed.output)] == [str(NUM_STEPS)]
    steps = read_record(record).steps
    assert [step.iteration for step in steps] == list(range(1, NUM_STEPS + 1))
    before = whole.record.steps
    assert [step.exposed_seconds for step in steps[:SAVED_AT]] == [step.exposed_seconds for step in before[:SAVED_AT]]
    exposed = [step["exposed_seconds"] for step in resumed.steps]
    assert [step.exposed_seconds for step in steps[SAVED_AT:]] == exposed
    assert not any(np.isnan(step.seconds).any() for step in steps)


def test_the_last_rank_tells_everything_though_it_reads_no_data(tmp_path: Path) -> None:
    flags = f"--num-layers 1 --train-iters 2 --log-interval 2 --tensorboard-dir {tmp_path / 'tb'}"
    record = f"--balance-record {tmp_path / 'record'}"
    tensor_parallel = run(tmp_path / "steps", f"{flags} --tensor-model-parallel-size 2 {record}", num_ranks=4)
    assert set(scalars(tmp_path / "tb", rank=3)) == NAMES
    assert len(LINE.findall(tensor_parallel.output)) == 1
    steps = read_record(tmp_path / "record").steps
    assert len(steps) == 2
    assert all((step.seconds > 0).all() for step in steps)


def test_a_virtual_pipeline_knows_its_ranks_but_not_its_micro_batches(tmp_path: Path) -> None:
    flags = "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --train-iters 2"
    pipeline = run(tmp_path / "steps", f"{flags} --log-interval 1 --balance-record {tmp_path / 'record'}", num_ranks=2)
    lines = [match.groupdict() for match in LINE.finditer(pipeline.output)]
    assert [line["measured"] for line in lines] == ["1.0000", "1.0000"]  # one replica
    assert all(float(line["busiest"]) > 0 for line in lines)
    steps = read_record(tmp_path / "record").steps
    assert [step.iteration for step in steps] == [1, 2]
    assert all(np.isnan(step.seconds).all() for step in steps)


def test_a_folder_that_cannot_be_written_ends_the_run_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    flags = f"{FLAGS} --num-layers 1 --train-iters 2 --balance-record {tmp_path / 'file' / 'record'}"
    with pytest.raises(RunFailed) as failed:
        train(tmp_path / "steps", flags.split(), num_ranks=2)
    assert f"megatron_balance: ranks 0, 1 cannot go on. rank 0: --balance-record {tmp_path / 'file'}" in str(
        failed.value
    )
    assert "Name a folder that every node can write to." in str(failed.value)


SCHEDULE = build_data_schedule(
    [7, 5, 4, 4, 3, 1],
    cost_model=CostModel(linear=10, quadratic=1),
    topology=Topology(2),
    limits=Limits(8),
    home_ranks=[0, 0, 0, 1, 1, 1],
)
STEP = BalancedStep(
    SCHEDULE.num_microbatches,
    [8] * SCHEDULE.num_microbatches,
    step_tokens=2 * 8 * SCHEDULE.num_microbatches,
    schedule=SCHEDULE,
    plan_seconds=0.25,
)


class TestFigures:
    def test_imbalance_is_the_objective_s(self) -> None:
        """With ranks that meet in every micro-batch, the log and the report name the same number."""
        schedule = build_data_schedule(
            [8, 6, 5, 3, 3],
            cost_model=CostModel.tokens(),
            topology=Topology(2, ep_size=2),
            limits=Limits(9),
            objective="microbatch",
        )
        costs = schedule.cost_grid
        planned = Figures.of_step(STEP, schedule=schedule).planned_imbalance
        assert planned == costs.max(axis=0).sum() / costs.sum(axis=1).mean()
        assert planned == schedule_metrics(schedule).microbatch_imbalance
        assert planned > costs.sum(axis=1).max() / costs.sum(axis=1).mean()

    def test_of_a_step(self) -> None:
        figures = Figures.of_step(STEP, schedule=SCHEDULE)
        ranks = SCHEDULE.cost_grid.sum(axis=1)
        assert figures.planned_imbalance == ranks.max() / ranks.mean()
        assert figures.num_microbatches == SCHEDULE.num_microbatches
        assert figures.plan_seconds == 0.25
        assert figures.padding_fraction == 1 - 24 / (2 * 8 * SCHEDULE.num_microbatches)
        moved = sum(
            length
            for length, home, rank in zip(SCHEDULE.lengths, [0, 0, 0, 1, 1, 1], SCHEDULE.destinations(), strict=True)
            if home != rank
        )
        assert figures.moved_fraction == moved / 24
        assert set(figures.known()) == PLANNED_NAMES

    def test_means_leave_out_what_is_not_known(self) -> None:
        mean = Figures.mean([Figures(over_bound=1.0, drift=0.5), Figures(over_bound=2.0)])
        assert mean.known() == {"over_bound": 1.5, "drift": 0.5}


Written = list[tuple[int, int, Figures]]
"""The figures that writers got: iteration, writer, figures."""


class TestOneRank:
    @pytest.fixture
    def written(self, monkeypatch: pytest.MonkeyPatch) -> Written:
        kept: Written = []
        monkeypatch.setattr(
            run_metrics,
            "write_scalars",
            lambda figures, *, iteration, newest: kept.append((iteration, newest, figures)),
        )
        return kept

    @pytest.fixture
    def metrics(self, written: Written) -> Iterator[RunMetrics]:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        group: Any = dist.group.WORLD
        yield RunMetrics(RunLog(enabled=False), log_interval=2, group=group, dp_rank=0, dp_size=1)
        dist.destroy_process_group()

    def take(self, metrics: RunMetrics, iteration: int, *, seconds: float | None) -> None:
        metrics.begin(STEP, iteration=iteration)
        if seconds is not None:
            metrics.measured(TimedStep(iteration, SCHEDULE, 1, np.array([seconds])))
        metrics.logged(iteration)

    def test_a_step_that_runs_again_counts_once(self, metrics: RunMetrics, written: Written) -> None:
        metrics.begin(STEP, iteration=1)
        metrics.measured(TimedStep(1, SCHEDULE, 1, np.array([5.0])))
        self.take(metrics, 1, seconds=1.0)
        self.take(metrics, 2, seconds=2.0)
        metrics.flush()
        [(iteration, _, figures)] = written
        assert iteration == 2
        assert figures.busiest_rank_seconds == 1.5

    def test_each_interval_begins_anew_and_an_empty_one_is_silent(self, metrics: RunMetrics, written: Written) -> None:
        for iteration, seconds in enumerate((1.0, 2.0, 3.0, None), start=1):
            self.take(metrics, iteration, seconds=seconds)
        metrics.logged(6)
        metrics.flush()
        assert [iteration for iteration, *_ in written] == [2, 4]
        assert written[1][2].busiest_rank_seconds == 3.0

    def test_what_was_not_measured_is_unknown(self, metrics: RunMetrics, written: Written) -> None:
        self.take(metrics, 2, seconds=None)
        metrics.flush()
        [(*_, figures)] = written
        assert set(figures.known()) == {*PLANNED_NAMES, "num_shapes"}

    def test_shapes_are_counted_over_the_whole_run(self, metrics: RunMetrics, written: Written) -> None:
        for iteration, tokens in enumerate(([8, 16], [8, 8], [8, 24], [16, 24]), start=1):
            step = BalancedStep(2, tokens, schedule=SCHEDULE)
            metrics.begin(step, iteration=iteration)
            metrics.logged(iteration)
        metrics.flush()
        assert [figures.num_shapes for *_, figures in written] == [2, 3]

    def test_a_step_does_not_wait_for_its_own_figures(
        self, metrics: RunMetrics, written: Written, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        met, real = threading.Event(), run_metrics.gather_rank_seconds

        def gather(*positional: Any, **keywords: Any) -> Any:
            assert threading.current_thread() is not threading.main_thread()
            assert met.wait(timeout=30)
            return real(*positional, **keywords)

        monkeypatch.setattr(run_metrics, "gather_rank_seconds", gather)
        self.take(metrics, 2, seconds=1.0)
        self.take(metrics, 3, seconds=2.0)
        assert not written
        met.set()
        self.take(metrics, 4, seconds=3.0)  # ends the next interval
        assert [(iteration, newest) for iteration, newest, _ in written] == [(2, 4)]
        metrics.flush()
        assert [(iteration, newest) for iteration, newest, _ in written] == [(2, 4), (4, 4)]
        assert written[1][2].busiest_rank_seconds == 2.5

    def test_lost_peers_end_a_later_step(
        self, metrics: RunMetrics, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def lost(*_: Any, **__: Any) -> Any:
            raise PeerError("waited for the seconds of all ranks")

        monkeypatch.setattr(run_metrics, "gather_rank_seconds", lost)
        self.take(metrics, 2, seconds=1.0)
        with pytest.raises(PeerError, match="waited for the seconds"):
            metrics.flush()
        assert "WARNING: the figures of iteration 2: waited for the seconds" in capsys.readouterr().out
        metrics.flush()  # once


def test_a_full_disk_is_told_once_and_does_not_end_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "record"
    recording = RunRecording(folder, info=None, dp_rank=0, resume=False)
    recording.measured(TimedStep(1, SCHEDULE, SCHEDULE.num_microbatches, np.ones(SCHEDULE.num_microbatches)))
    shutil.rmtree(folder)
    folder.touch()  # where the folder was, nothing can be written
    recording.flush()
    recording.measured(TimedStep(2, SCHEDULE, SCHEDULE.num_microbatches, np.ones(SCHEDULE.num_microbatches)))
    recording.flush()
    [line] = capsys.readouterr().out.splitlines()
    assert f"--balance-record {folder}: " in line
    assert line.endswith("Training continues without the record.")
