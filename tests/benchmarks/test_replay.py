import json
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.planner.device_rates import ASSUMED_DEVICES
from benchmarks.replay.device import ReplayDevice
from benchmarks.replay.gains import BY_FLOPS, gain, predict_gains
from benchmarks.replay.gains_report import write_gains
from benchmarks.replay.length_sets import LENGTH_SETS, MADE_UP, RARE_LONG, draw_batches
from benchmarks.replay.policies import OTHERS, OURS_CALIBRATED, OURS_FLOPS, TOKEN_SUM_KK, plan_all
from benchmarks.replay.run import batches_in_turn, replay_setup
from benchmarks.replay.setups import reduced_shape, seed_setups, toy_setups
from benchmarks.replay.steps import Stopwatch, microbatches_of, step_seconds
from megatron_balance import CostModel, ModelShape, Topology
from megatron_balance.cost.calibration import Calibration
from megatron_balance.lengths.synthetic import SYNTHETIC_LENGTHS

ROOT = Path(__file__).resolve().parents[2]
DENSE, SPARSE = toy_setups()


class ClosedForm:
    """A device that takes exactly what a calibration says, and counts its runs."""

    def __init__(self, calibration, slow_first_run=0.0):
        self.calibration, self.slow_first_run = calibration, slow_first_run
        self.runs = []

    def seconds(self, lengths):
        first = tuple(lengths) not in self.runs
        self.runs.append(tuple(lengths))
        return self.calibration(list(lengths)) + (self.slow_first_run if first else 0.0)


SLOW_ATTENTION = Calibration(per_microbatch=2e-3, per_sequence=1e-5, linear=1e-6, quadratic=8e-9)


def replayed(setup, calibration=SLOW_ATTENTION, num_steps=2, seconds=100.0, timer=None, repeats=1):
    batches = [*batches_in_turn(setup.length_names, setup=setup, num_steps=num_steps, lengths_folder=None)]
    timer = timer or ClosedForm(calibration)
    return replay_setup(setup, timer=timer, calibration=calibration, batches=batches, repeats=repeats, seconds=seconds)


def test_setups_are_those_of_the_pull_request_at_less_depth():
    setups = seed_setups(num_layers=4)
    assert [(one.topology.dp_size, one.max_tokens_per_gpu, one.global_batch_size, one.objective) for one in setups] == [
        (4, 9216, 128, "step"),
        (4, 8192, 128, "microbatch"),
        (4, 9216, 256, "step"),
        (2, 20480, 256, "microbatch"),
    ]
    assert [one.goal for one in setups] == [0.127, 0.301, 0.14, 0.206]
    assert [one.shape.hidden_size for one in setups] == [2560, 2048, 2560, 2048]
    assert [one.shape.num_experts for one in setups] == [0, 128, 0, 128]
    assert {one.shape.num_layers for one in setups} == {4}


def test_experts_wait_for_the_slowest_rank_since_each_rank_runs_whole():
    for setup in seed_setups(num_layers=2):
        assert setup.cost_model.expert_linear == 0
        assert setup.cost_model == setup.flops_model == CostModel.from_shape(setup.shape)


@pytest.mark.parametrize("name", ["Qwen3-4B", "Qwen3-30B-A3B"])
@pytest.mark.parametrize("num_layers", [1, 4, 12])
def test_less_depth_keeps_the_ratio_of_linear_to_quadratic_cost(name, num_layers):
    whole = ModelShape.preset(name)
    part = reduced_shape(whole, num_layers=num_layers)
    ratios = [cost.linear / cost.quadratic for cost in map(CostModel.from_shape, (whole, part))]
    assert ratios[0] == pytest.approx(ratios[1], rel=2e-3)
    assert part.padded_vocab_size % 128 == 0


def test_a_model_of_several_kinds_of_layers_is_not_cut():
    with pytest.raises(ValueError, match="2 kinds"):
        reduced_shape(ModelShape.preset("Qwen3.5-35B-A3B"), num_layers=4)
    with pytest.raises(ValueError, match="--num-layers is 37"):
        reduced_shape(ModelShape.preset("Qwen3-4B"), num_layers=37)


def test_a_step_takes_the_slowest_ranks_sum_or_the_sum_of_the_slowest():
    grid = [[1.0, 5.0], [2.0, 3.0], [4.0, 1.0], [4.5, 1.0]]
    assert step_seconds(grid, setup=DENSE) == pytest.approx(6.0)
    meeting = replace(SPARSE, topology=Topology(4, ep_size=4))
    assert step_seconds(grid, setup=meeting) == pytest.approx(4.5 + 5.0)
    # Expert groups of two ranks: 2 + 5 and 4.5 + 1.
    in_pairs = replace(SPARSE, topology=Topology(4, ep_size=2))
    assert step_seconds(grid, setup=in_pairs) == pytest.approx(7.0)


def test_an_empty_micro_batch_runs_its_dummy():
    assert microbatches_of([[[1, 0]], [[]]], batch=np.array([5, 3]), setup=DENSE) == [[(3, 5)], [(1,)]]


def test_micro_batches_of_the_same_lengths_share_a_measurement_and_the_quickest_run_counts():
    timer = ClosedForm(SLOW_ATTENTION, slow_first_run=1.0)
    stopwatch = Stopwatch(timer, repeats=3)
    stopwatch.measure([(1, 2), (7,), (1, 2)])
    stopwatch.measure([(7,), (9,)])
    # Passes over all, not three runs of one in a row.
    assert timer.runs == [(1, 2), (7,)] * 3 + [(9,)] * 3
    assert stopwatch.measured[7,] == SLOW_ATTENTION([7])


def test_the_largest_micro_batch_runs_first_unmeasured():
    timer = ClosedForm(SLOW_ATTENTION)
    result = replayed(DENSE, num_steps=1, timer=timer)
    assert timer.runs[0] == max(result.microbatches, key=sum)
    assert len(timer.runs) == 1 + len(result.microbatches)


def test_plans_are_measured_in_turn():
    timer = ClosedForm(SLOW_ATTENTION)
    replayed(SPARSE, num_steps=1, timer=timer)
    (batch,) = draw_batches("reasoning_gym", setup=SPARSE, num_batches=1, lengths_folder=None)
    grids = [
        microbatches_of(ranks, batch=batch, setup=SPARSE)
        for ranks in plan_all(batch, setup=SPARSE, calibration=SLOW_ATTENTION).values()
    ]
    first_slots = list(dict.fromkeys(grid[0][0] for grid in grids))
    assert timer.runs[1 : 1 + len(first_slots)] == first_slots


@pytest.mark.parametrize("setup", [DENSE, SPARSE], ids=lambda setup: setup.name)
def test_on_a_device_as_calibrated_what_was_predicted_is_measured(setup):
    result = replayed(setup)
    assert {*OTHERS[:4], OURS_FLOPS, OURS_CALIBRATED} <= set(result.policies())
    for step in result.steps:
        assert step.seconds == pytest.approx(step.by_calibration, rel=1e-6)
    assert result.calibration_error() == pytest.approx(0, abs=1e-6)
    assert result.flops_error() > 0.05


@pytest.mark.parametrize("setup", [DENSE, SPARSE], ids=lambda setup: setup.name)
def test_ours_with_calibration_is_ahead_of_every_way_that_keeps_the_cap(setup):
    result = replayed(setup)
    ours = result.saved(OURS_CALIBRATED, "seconds")
    assert ours > 0.02
    assert result.total(OURS_CALIBRATED, "num_over_cap") == 0
    for policy in result.policies():
        if result.total(policy, "num_over_cap") == 0:
            assert ours >= result.saved(policy, "seconds") - 1e-3
    assert result.saved(TOKEN_SUM_KK, "seconds") == 0


def test_a_spent_budget_ends_the_replay_after_a_whole_step():
    result = replayed(DENSE, num_steps=2, seconds=0.0)
    assert len(result.steps) == len(result.policies())


def test_length_sets_take_turns():
    names = ("gsm8k_sft", "alpaca_eval")
    batches = [*batches_in_turn(names, setup=DENSE, num_steps=3, lengths_folder=None)]
    assert [name for name, _ in batches] == ["gsm8k_sft", "alpaca_eval", "gsm8k_sft"]
    assert not np.array_equal(batches[0][1], batches[2][1])


@pytest.mark.parametrize("name", LENGTH_SETS)
def test_every_length_set_fills_its_batches_under_the_cap(name):
    setup = seed_setups(num_layers=1)[0]
    batches = draw_batches(name, setup=setup, num_batches=2, lengths_folder=None)
    assert [batch.shape for batch in batches] == [(setup.global_batch_size,)] * 2
    assert max(batch.max() for batch in batches) <= setup.cap
    assert set(LENGTH_SETS) == {*SYNTHETIC_LENGTHS, *MADE_UP}


def test_a_length_set_without_a_sample_that_fits_is_refused():
    small = replace(DENSE, max_tokens_per_gpu=64)
    with pytest.raises(ValueError, match="tau_airline has no sample of at most 64"):
        draw_batches("tau_airline", setup=small, num_batches=1, lengths_folder=None)


def test_rare_long_samples_are_rare_and_long():
    setup = seed_setups(num_layers=1)[3]
    lengths = np.concatenate(draw_batches(RARE_LONG, setup=setup, num_batches=20, lengths_folder=None))
    assert np.mean(lengths > 2000) == pytest.approx(0.02, abs=0.005)
    assert np.median(lengths) == pytest.approx(128, rel=0.05)


def test_there_is_no_gain_where_all_samples_are_alike_and_a_large_one_where_few_micro_batches_do_not_divide():
    alike = np.full(DENSE.global_batch_size, 128)
    assert gain(alike, setup=DENSE, cost_model=DENSE.cost_model) == pytest.approx(0, abs=1e-9)
    # Three micro-batches for four ranks: first-fit halves one, and the others keep twice as many.
    three = np.full(24, 128)
    assert gain(three, setup=DENSE, cost_model=DENSE.cost_model) == pytest.approx(0.25, abs=1e-9)


def test_gains_are_written_with_what_reaches_the_bar(tmp_path):
    setups = [replace(setup, goal=0.05) for setup in toy_setups()]
    names = ("gsm8k_sft", "alpaca_eval", RARE_LONG)
    gains = predict_gains(setups, devices=ASSUMED_DEVICES[2:3], lengths_folder=None, names=names)
    judges = {BY_FLOPS, ASSUMED_DEVICES[2].name}
    assert {(one.setup, one.judge, one.lengths) for one in gains} == {
        (setup.name, judge, lengths) for setup in setups for judge in judges for lengths in names
    }
    header = _header()
    write_gains(gains, setups=setups, header=header, out=tmp_path)
    markdown = (tmp_path / "gains.md").read_text()
    best = max((one for one in gains if one.setup == setups[0].name), key=lambda one: one.mean)
    assert f"{best.mean:.1%}: {best.lengths} ({best.judge})" in markdown
    assert markdown.count("**") // 2 - 1 == sum(one.mean >= 0.05 for one in gains)
    assert len(json.loads((tmp_path / "gains.json").read_text())["gains"]) == len(gains)


def _header():
    from benchmarks.planner.report import make_header

    return make_header(command="test", real_lengths=False)


def test_a_gpu_is_named_in_file_names_without_blanks():
    assert ReplayDevice("cuda", "NVIDIA H200", "bfloat16").slug == "nvidia_h200"
    assert ReplayDevice("cpu", "AMD EPYC", "float32").slug == "cpu"


@pytest.mark.slow
def test_the_toy_runs_end_to_end_on_real_megatron_layers(tmp_path):
    command = [str(ROOT / "scripts" / "bench_gpu.sh"), "--toy", "--steps", "1", "--synthetic", "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    results = json.loads((tmp_path / "toy_replay_cpu.json").read_text())
    assert [setup["name"] for setup in results["setups"]] == [DENSE.name, SPARSE.name]
    for setup in results["setups"]:
        assert {step["policy"] for step in setup["steps"]} >= {TOKEN_SUM_KK, OURS_FLOPS, OURS_CALIBRATED}
        assert all(step["seconds"] > 0 for step in setup["steps"])
        assert all(step["num_over_cap"] == 0 for step in setup["steps"] if step["policy"].startswith("ours"))
    assert results["header"]["versions"]["megatron-core"]
    assert Calibration.read(tmp_path / "toy_calibration_cpu_toy.json").origin["shape"]["hidden_size"] == 64
    assert "A toy" in (tmp_path / "toy_replay_cpu.md").read_text()


def test_gains_in_the_repository_are_of_the_seeds_setups():
    results = json.loads((ROOT / "benchmarks" / "results" / "gains.json").read_text())
    setups = seed_setups(num_layers=4)
    assert results["goals"] == {setup.name: setup.goal for setup in setups}
    for setup in setups:
        reached = [one for one in results["gains"] if one["setup"] == setup.name and one["mean"] >= setup.goal]
        assert reached, f"no length set reaches the bar of {setup.name}"
