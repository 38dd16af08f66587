import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.planner import ablation
from benchmarks.planner.cost_ways import COST_WAYS, slime_approximate, slime_counter, verl_fixed
from benchmarks.planner.device_rates import ASSUMED_DEVICES, DeviceRates, measured_devices
from benchmarks.planner.losses import ABLATED_SETUPS, Loss, measure_losses, true_cost_model
from benchmarks.planner.setups import QUICK_SETUPS, Setup
from megatron_balance import CostModel, ModelShape, Topology
from megatron_balance.cost.calibration import Calibration
from megatron_balance.model.flops import linear_coefficient

ROOT = Path(__file__).resolve().parents[2]


def test_slimes_first_coefficient_is_that_of_its_pull_request():
    dense, sparse = (
        slime_approximate(ModelShape.preset("Qwen3-4B")),
        slime_approximate(ModelShape.preset("Qwen3-30B-A3B")),
    )
    assert (dense.linear, dense.quadratic) == (2 * 2560 + 3 * 9728 // 2, 1)
    assert sparse.linear == 2 * 2048 + 3 * 8 * 768 // 2


def test_slimes_counter_is_right_but_for_what_its_docstring_says():
    shape = ModelShape.preset("Qwen3-30B-A3B")
    counted, exact = slime_counter(shape), CostModel.from_shape(shape)
    # Forward alone: exact counts three GEMM passes and 3.5 of the core.
    assert 2 * exact.quadratic == 7 * counted.quadratic
    h, n, g, d, layers = 2048, 32, 4, 128, 48
    output, key_value, router = 2 * h * (n * d - h), 2 * h * d * (2 * g - n // g), 2 * h * 128
    assert exact.linear == 3 * (counted.linear + layers * (output + key_value + router))


def test_slimes_counter_takes_every_layer_for_full_attention():
    shape = ModelShape.preset("Qwen3.5-35B-A3B")
    assert 2 * CostModel.from_shape(shape).quadratic * 4 == 7 * slime_counter(shape).quadratic


def test_slimes_counter_refuses_what_it_was_not_written_for():
    with pytest.raises(ValueError, match="grouped-query"):
        slime_counter(ModelShape.preset("DeepSeek-V3"))


def test_rates_give_back_the_calibration_they_were_taken_from():
    shape = ModelShape.preset("gpt-oss-20b")
    for device in ASSUMED_DEVICES:
        seconds = device.calibration(shape)
        again = DeviceRates.from_calibration(seconds, shape=shape, name=device.name).calibration(shape)
        for name in ("per_microbatch", "per_sequence", "linear", "expert_linear", "quadratic"):
            assert getattr(again, name) == pytest.approx(getattr(seconds, name), rel=1e-12)
        assert again.windows[0] == pytest.approx(seconds.windows[0], rel=1e-12)


def test_rates_scale_fixed_times_by_layers_and_the_rest_by_flops():
    device = DeviceRates("d", gemm=1e-15, attention=4e-15, per_microbatch_layer=1e-3, per_sequence_layer=1e-6)
    shape = ModelShape.preset("Qwen3-4B")
    seconds = device.calibration(shape)
    assert seconds.per_microbatch == pytest.approx(36e-3)
    assert seconds.linear / seconds.quadratic == pytest.approx(linear_coefficient(shape) * 3 / 3.5 / 4)


def test_a_model_without_attention_tells_no_rate():
    shape = ModelShape.preset("Nemotron-H-8B").stack_of(
        ModelShape.preset("Nemotron-H-8B").decoder_layers()[0], num_layers=2
    )
    with pytest.raises(ValueError, match="no attention"):
        DeviceRates.from_calibration(Calibration(linear=1.0), shape=shape, name="mamba only")


def test_the_assumed_family_differs_in_attention_alone():
    shape = ModelShape.preset("Qwen3-4B")
    exact = CostModel.from_shape(shape)
    ratios = []
    for device in ASSUMED_DEVICES:
        seconds = device.calibration(shape)
        ratios.append(seconds.linear / seconds.quadratic / (exact.linear / exact.quadratic))
        assert seconds.per_microbatch > 0
        assert seconds.per_sequence > 0
    assert ratios == pytest.approx([2, 1, 1 / 2, 1 / 3])


def plain_device(**rates):
    return DeviceRates("plain", **{"gemm": 1e-15, "attention": 1e-15, **rates})


def test_where_seconds_are_flops_planning_by_flops_loses_nothing():
    for loss in measure_losses(QUICK_SETUPS, devices=[plain_device()], lengths_folder=None):
        if loss.way == "FLOPs":
            assert loss.worst == pytest.approx(0, abs=1e-3)
        if loss.way == "tokens":
            assert loss.mean > 0.005


def test_tokens_lose_nothing_where_attention_is_free():
    losses = measure_losses(QUICK_SETUPS[:1], devices=[plain_device(attention=0.0)], lengths_folder=None)
    by_way = {loss.way: loss.mean for loss in losses}
    assert by_way["tokens"] == pytest.approx(0, abs=1e-3)
    assert by_way["24576 L + L² (verl)"] > by_way["tokens"]


def test_a_device_whose_attention_is_slow_punishes_flops_and_more_so_tokens():
    at_par, slow = ASSUMED_DEVICES[1], ASSUMED_DEVICES[3]
    setup = Setup(
        "many ranks",
        model="Qwen3-30B-A3B",
        topology=Topology(16),
        max_tokens_per_gpu=16384,
        global_batch_size=512,
        length_names=("reasoning_gym",),
        num_batches=2,
    )
    losses = {
        (loss.device, loss.way): loss.mean
        for loss in measure_losses([setup], devices=[at_par, slow], lengths_folder=None)
    }
    assert losses[slow.name, "tokens"] > losses[slow.name, "FLOPs"] > losses[at_par.name, "FLOPs"] >= -1e-3


def test_tensor_parallel_ranks_share_tokens_and_not_fixed_times():
    setup = next(setup for setup in ABLATED_SETUPS if setup.topology.tp_size == 4)
    device = ASSUMED_DEVICES[1]
    whole, shared = (
        device.calibration(ModelShape.preset(setup.model)).cost_model(ep_size=8),
        true_cost_model(setup, device=device),
    )
    assert shared.linear == pytest.approx(whole.linear / 4, rel=1e-9)
    assert shared.per_microbatch == whole.per_microbatch
    assert shared.expert_linear == pytest.approx(whole.expert_linear / 4, rel=1e-9)


def test_measured_calibrations_are_found_by_name(tmp_path):
    shape = ModelShape.preset("Qwen3-4B")
    measured = Calibration(linear=2e-6, quadratic=1e-10, origin={"shape": asdict(shape)})
    measured.write(tmp_path / "calibration_cpu.json")
    (tmp_path / "other.json").write_text("{}")
    (device,) = measured_devices(tmp_path)
    assert (device.name, device.measured) == ("calibration_cpu", True)
    assert device.calibration(shape).linear == pytest.approx(2e-6)


def test_a_calibration_that_does_not_say_its_model_is_refused(tmp_path):
    Calibration(linear=1.0).write(tmp_path / "calibration_cpu.json")
    with pytest.raises(ValueError, match="which model was measured"):
        measured_devices(tmp_path)


def test_a_loss_tells_its_mean_and_its_worst():
    loss = Loss("s", device="d", way="w", lengths="l", losses=(0.0, 0.03), over_bound=(1.0, 1.0))
    assert (loss.mean, loss.worst) == (pytest.approx(0.015), 0.03)


def test_the_ablation_writes_what_it_says(tmp_path, capsys):
    assert ablation.main(["--quick", "--synthetic", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "ablation.md").read_text()
    results = json.loads((tmp_path / "ablation.json").read_text())
    num_sets = sum(len(setup.length_names) for setup in QUICK_SETUPS)
    assert len(results["losses"]) == num_sets * len(COST_WAYS) * len(results["devices"])
    assert all(len(loss["losses"]) == QUICK_SETUPS[0].num_batches for loss in results["losses"])
    for device in results["devices"]:
        assert re.search(rf"^## Truth: {re.escape(device['name'])}$", printed, re.MULTILINE)
    for way in COST_WAYS:
        assert printed.count(f"| {way} |") >= len(results["devices"])


def test_the_ablation_in_the_repository_is_of_a_full_run():
    results = json.loads((ROOT / "benchmarks" / "results" / "ablation.json").read_text())
    assert results["setups"] == [setup.name for setup in ABLATED_SETUPS]
    assert {loss["way"] for loss in results["losses"]} == set(COST_WAYS)
    assert verl_fixed().linear == 24576
