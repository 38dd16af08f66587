"""`megatron-balance fit`: known coefficients come back, on one size and on sizes of their own, and limits are said."""

import json
import re

import numpy as np
import pytest
from recorded_runs import record_writers, run_info

from megatron_balance import CostModel, Limits, Topology, build_data_schedule
from megatron_balance.cli import main
from megatron_balance.cost.calibration import Calibration, fit_microbatches
from megatron_balance.planner import Forest
from megatron_balance.record import StepRecord, read_record
from megatron_balance.record.fit import fit_record, measurements

FLOPS = CostModel(linear=2000, quadratic=1, per_microbatch=5000, cp_exchange=300)
TRUTH = {"per_microbatch": 3e-3, "per_token": 4e-6, "per_core": 3e-9, "per_received": 2e-5}
RATE = 0.7
"""Of attention, by which the FLOPs of the record are weighed: a unit of its core is 0.7 FLOPs."""


def write_record(folder, topology, *, num_steps, noise=0.0, longest=4000, cost_model=FLOPS):
    """A run whose micro-batches take TRUTH, planned for real; every rank computes its part of shared samples."""
    info = run_info(topology, limits=Limits(4096), cost_model=cost_model, environment={"attention_rate": RATE})
    rng = np.random.default_rng(7)
    num_rows = topology.dp_cp_size if topology.dynamic_cp else topology.dp_size
    with record_writers(folder, info, num_ranks=num_rows) as writers:
        for iteration in range(1, num_steps + 1):
            lengths = np.clip(rng.lognormal(6, 1.2, 64).astype(np.int64), 16, longest)
            schedule = build_data_schedule(lengths, cost_model=cost_model, topology=topology, limits=info.limits)
            writers[0].add_step(StepRecord.from_schedule(schedule, iteration=iteration))
            for rank, writer in enumerate(writers):
                sizes = schedule.cp_sizes[rank] if topology.dynamic_cp else [1] * schedule.num_microbatches
                seconds = [
                    seconds_of(lengths[list(slot)], topology=topology, size=size) * max(rng.normal(1, noise), 0.1)
                    for slot, size in zip(schedule.ranks[rank], sizes, strict=True)
                ]
                writer.add_seconds(iteration, seconds=np.array(seconds))
    return folder


def seconds_of(lengths, *, topology, size):
    padded = (topology.with_cp_size(size) if topology.dynamic_cp else topology).padded_seq_len(lengths)
    attention = np.maximum(TRUTH["per_core"] * padded.astype(float) ** 2, TRUTH["per_received"] * padded * (size - 1))
    of_lengths = (TRUTH["per_token"] * padded + attention).sum() / size
    return TRUTH["per_microbatch"] + of_lengths


@pytest.mark.parametrize(
    ("topology", "ranks"),
    [
        pytest.param(Topology(4), 1, id="one-size"),
        pytest.param(Topology(2, cp_size=2, tp_size=2), 4, id="model-parallel"),
        pytest.param(Topology(4, dynamic_cp=True), 1, id="sizes-of-their-own"),
    ],
)
def test_known_seconds_come_back(tmp_path, capsys, topology, ranks):
    longest = 16000 if topology.dynamic_cp else 4000
    record = write_record(tmp_path / "record", topology, num_steps=24, noise=0.01, longest=longest)
    assert main(["fit", str(record), "--out", str(tmp_path / "seconds.json")]) == 0
    costs = Calibration.read(tmp_path / "seconds.json")
    assert costs.costs.linear / 1e18 == pytest.approx(TRUTH["per_token"] * ranks, rel=0.1)
    assert costs.costs.quadratic / 1e18 == pytest.approx(TRUTH["per_core"] * ranks, rel=0.1)
    assert costs.costs.per_microbatch / 1e18 == pytest.approx(TRUTH["per_microbatch"], rel=0.2)
    if topology.dynamic_cp:
        assert costs.costs.cp_exchange / 1e18 == pytest.approx(TRUTH["per_received"], rel=0.2)
    assert costs.origin["linear_tflops"] == pytest.approx(2000 / TRUTH["per_token"] / ranks / 1e12, rel=0.1)
    assert costs.origin["attention_tflops"] == pytest.approx(RATE / TRUTH["per_core"] / ranks / 1e12, rel=0.1)
    assert costs.held_out_error is not None
    assert costs.held_out_error < 0.02
    printed = capsys.readouterr().out
    assert f"it is off by {costs.held_out_error:.1%} (median)" in printed
    assert "Longer ones are extrapolated" in printed
    told = re.search(r"r = ([\d.]+):", printed)
    assert told is not None
    assert float(told.group(1)) == pytest.approx(RATE / TRUTH["per_core"] / (2000 / TRUTH["per_token"]), rel=0.1)


def test_a_shared_prompt_takes_its_seconds_once(tmp_path):
    """Fault: it was fitted as if each of its samples took them."""
    rng, groups, info = np.random.default_rng(3), np.arange(96) // 8, run_info(Topology(2), limits=Limits(4096))
    with record_writers(tmp_path, info, num_ranks=2) as writers:
        for iteration in range(1, 13):
            prompts = rng.integers(50, 900, 12)[groups]
            lengths = prompts + rng.integers(50, 900, 96)
            forest = Forest.from_prompts(lengths, prompt_tokens=prompts, groups=groups)
            options = {"cost_model": info.cost_model, "topology": info.topology, "limits": info.limits}
            schedule = build_data_schedule(lengths, forest=forest, **options)
            writers[0].add_step(StepRecord.from_schedule(schedule, iteration=iteration))
            for writer, slots in zip(writers, schedule.ranks, strict=True):
                seconds = [
                    TRUTH["per_microbatch"]
                    + sum(of_tokens(lengths[sample]) - of_tokens(prompts[sample]) for sample in slot)
                    + sum(of_tokens(prompts[8 * group]) for group in {int(groups[sample]) for sample in slot})
                    for slot in slots
                ]
                writer.add_seconds(iteration, seconds=np.array(seconds))
    calibration = fit_record(read_record(tmp_path))[1]
    assert calibration.costs.linear / 1e18 == pytest.approx(TRUTH["per_token"], rel=1e-3)
    assert calibration.costs.quadratic / 1e18 == pytest.approx(TRUTH["per_core"], rel=1e-3)


def of_tokens(tokens):
    return TRUTH["per_token"] * tokens + TRUTH["per_core"] * float(tokens) ** 2


def test_a_pipeline_pays_for_launches_on_every_stage(tmp_path):
    """Measured is the first of two stages: the whole model takes twice its seconds, launches among them."""
    record = write_record(tmp_path / "record", Topology(4, pp_size=2), num_steps=24, noise=0.01)
    assert main(["fit", str(record), "--out", str(tmp_path / "seconds.json")]) == 0
    costs = Calibration.read(tmp_path / "seconds.json").costs
    assert costs.per_microbatch / 1e18 == pytest.approx(2 * TRUTH["per_microbatch"], rel=0.2)
    assert costs.linear / 1e18 == pytest.approx(2 * TRUTH["per_token"], rel=0.1)


def test_the_first_step_is_left_out_and_the_error_is_of_steps_that_were_not_fitted(tmp_path):
    def fitted(folder):
        record = read_record(folder)
        measured = measurements(record)
        return fit_microbatches(measured, cost_model=record.info.cost_model), measured

    record = write_record(tmp_path / "slow", Topology(4), num_steps=6, noise=0.01)
    for file in record.glob("seconds_*.jsonl"):  # compilation
        first, *others = map(json.loads, file.read_text().splitlines())
        first["seconds"] = [10 * seconds for seconds in first["seconds"]]
        file.write_text("".join(json.dumps(line) + "\n" for line in (first, *others)))
    fit, measured = fitted(record)
    assert measured.steps.min() == 2
    assert fit.coefficients[1] == pytest.approx(TRUTH["per_token"], rel=0.1)
    # Three noisy steps: what was not fitted is off by more than what was.
    record = write_record(tmp_path / "noisy", Topology(4), num_steps=3, noise=0.6)
    fit, measured = fitted(record)
    own = np.abs(measured.features(fit.exchange) @ fit.coefficients / measured.seconds - 1)
    assert fit.error > float(np.median(own))


def test_two_steps_or_none_measured_are_too_few(tmp_path, capsys):
    record = write_record(tmp_path / "record", Topology(4), num_steps=2)
    assert main(["fit", str(record)]) == 2
    assert "measured micro-batches in 2 steps: 3 steps" in capsys.readouterr().err
    for file in record.glob("seconds_*.jsonl"):
        file.unlink()
    assert main(["fit", str(record)]) == 2
    assert "no measured micro-batch" in capsys.readouterr().err


def test_a_record_that_is_short_or_noisy_says_so(tmp_path, capsys):
    for name, longest, noise, said in (
        ("short", 64, 0.01, f"r = {RATE}"),  # what the record does not tell stays as the run planned
        ("noisy", 4000, 0.8, "Warning: large error"),
    ):
        record = write_record(tmp_path / name, Topology(4), num_steps=3, longest=longest, noise=noise)
        assert main(["fit", str(record), "--out", str(tmp_path / "seconds.json")]) == 0
        assert said in capsys.readouterr().out


def test_compare_says_where_costs_are_extrapolated(tmp_path, capsys):
    record = write_record(tmp_path / "record", Topology(4), num_steps=3, longest=1000)
    costs = tmp_path / "seconds.json"
    assert main(["fit", str(record), "--out", str(costs)]) == 0
    lengths = tmp_path / "lengths.npy"
    for longest in (1000, 3000):
        np.save(lengths, np.array([100, 200, longest, 300] * 4))
        batch = ["--data", "samples", "--global-batch-size", "8", "--dp-size", "2", "--max-tokens-per-gpu", "4096"]
        assert main(["compare", str(lengths), *batch, "--cost", str(costs)]) == 0
        said = capsys.readouterr().out
        assert ("sequences of up to 1000 tokens: up to 3000 is extrapolated" in said) == (longest == 3000)
