"""`megatron-balance compare`: figures that can be checked by hand, records, texts, sweeps, what it advises."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_balance.cli import main
from megatron_balance.cli.comparison.batches import GlobalBatch, look_ahead
from megatron_balance.cost.calibration import Calibration
from megatron_balance.cost.model import MICROBATCH_TOKENS, CostModel
from megatron_balance.cost.resolve import resolve_cost
from megatron_balance.mcore.setup.arguments import BalanceConfig
from megatron_balance.mcore.setup.flags import add_balance_args
from megatron_balance.model.shape import ModelShape
from megatron_balance.planner.build import build_data_schedule
from megatron_balance.planner.metrics import schedule_metrics
from megatron_balance.record.run_record import RunInfo
from megatron_balance.record.step import StepRecord
from megatron_balance.record.writers import PlanWriter, SecondsWriter
from megatron_balance.topology import Limits, Topology

BATCH = ["--global-batch-size", "64", "--dp-size", "4", "--max-tokens-per-gpu", "8192"]


def compare(*arguments: object) -> int:
    return main(["compare", *map(str, arguments)])


def figures_of(tmp_path: Path, *arguments: object) -> dict[str, Any]:
    """The content that `--json` writes, its policies by name."""
    out = tmp_path / "compare.json"
    assert compare(*arguments, "--json", out) == 0
    content = json.loads(out.read_text())
    content["policies"] = {figures["name"]: figures for figures in content.get("policies", [])}
    return content


@pytest.fixture
def lengths_file(tmp_path: Path) -> Path:
    file = tmp_path / "lengths.npy"
    np.save(file, np.random.default_rng(0).lognormal(6.5, 1.0, size=400).astype(np.int64).clip(8, 8000))
    return file


@pytest.fixture
def calibration_file(tmp_path: Path) -> Path:
    file = tmp_path / "calibration.json"
    Calibration(per_microbatch=2e-3, linear=1e-6, quadratic=1e-9).write(file)
    return file


def write_lengths(folder: Path, *lengths: int) -> Path:
    file = folder / "some.txt"
    file.write_text("".join(f"{length}\n" for length in lengths))
    return file


def test_figures_of_a_batch_that_is_planned_by_hand(tmp_path: Path) -> None:
    # Stock deals 6, 4 to rank 0 and 1, 1 to rank 1; evened out, both ranks have 6.
    file = write_lengths(tmp_path, 6, 1, 4, 1)
    arguments = [file, "--global-batch-size", 4, "--dp-size", 2, "--max-tokens-per-gpu", 8, "--lookahead", 1]
    policies = figures_of(tmp_path, *arguments)["policies"]
    assert list(policies) == ["stock", "packed", "balance-data"]
    stock, packed, balanced = policies.values()
    assert (stock["step_imbalance"], stock["microbatch_imbalance"]) == (10 / 6, 10 / 6)
    assert (stock["num_microbatches"], packed["num_microbatches"], balanced["num_microbatches"]) == (2, 2, 1)
    assert (stock["speedup"], packed["speedup"], balanced["speedup"]) == (1, 1, pytest.approx(10 / 6))
    assert balanced["step_imbalance"] == balanced["microbatch_imbalance"] == 1
    assert balanced["cap_headroom"] == pytest.approx(0.25)
    assert stock["over_bound"] == pytest.approx(10 / 6 - 1)
    assert stock["padding"] == 0


def test_seconds_follow_from_the_stated_speed(tmp_path: Path) -> None:
    file = write_lengths(tmp_path, 1024, 1024)
    arguments = [file, "--global-batch-size", 2, "--dp-size", 2, "--tp-size", 2, "--max-tokens-per-gpu", 2048]
    arguments += ["--model", "Qwen3-8B", "--peak-tflops", 1000, "--efficiency", 0.5]
    stock = figures_of(tmp_path, *arguments)["policies"]["stock"]
    cost_model = resolve_cost("flops", model="Qwen3-8B")
    flops = cost_model(1024) + cost_model.per_microbatch
    # Each rank runs one sample, on two GPUs at half of 1e15 FLOPs a second.
    assert stock["seconds_per_step"] == pytest.approx(flops / 1e15)
    assert stock["tokens_per_second_per_gpu"] == pytest.approx(2048 / (flops / 1e15) / 4)


def test_seconds_of_a_calibration_need_no_speed(tmp_path: Path, calibration_file: Path) -> None:
    file = write_lengths(tmp_path, 1000, 1000)
    arguments = [file, "--global-batch-size", 2, "--dp-size", 1, "--max-tokens-per-gpu", 2048]
    policies = figures_of(tmp_path, *arguments, "--cost", calibration_file)["policies"]
    assert policies["stock"]["seconds_per_step"] == pytest.approx(2 * 4e-3)
    assert policies["calibrated"]["seconds_per_step"] == pytest.approx(2e-3 + 2 * 2e-3)


def test_one_rank_is_even_with_itself_and_gains_by_packing_alone(lengths_file: Path, tmp_path: Path) -> None:
    arguments = [lengths_file, "--global-batch-size", 64, "--dp-size", 1, "--max-tokens-per-gpu", 8192]
    policies = figures_of(tmp_path, *arguments, "--model", "Qwen3-8B")["policies"]
    for figures in policies.values():
        assert figures["step_imbalance"] == figures["microbatch_imbalance"] == figures["pipeline_imbalance"] == 1
    assert policies["packed"]["speedup"] == pytest.approx(policies["by-flops"]["speedup"], rel=0.01)


def test_no_seconds_are_shown_where_no_speed_is_known(lengths_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(lengths_file, *BATCH, "--model", "Qwen3-8B") == 0
    printed = capsys.readouterr().out
    assert "step s" not in printed
    assert "tokens/s" not in printed
    assert "for seconds: --peak-tflops" in printed
    assert "step*" in printed
    assert compare(lengths_file, *BATCH, "--model", "Qwen3-8B", "--peak-tflops", 989) == 0
    printed = capsys.readouterr().out
    assert "step s" in printed
    assert "40% of 989 TFLOPS, an assumption" in printed


def test_policies_are_those_that_can_be_judged(lengths_file: Path, calibration_file: Path, tmp_path: Path) -> None:
    def names(*arguments: object) -> list[str]:
        return list(figures_of(tmp_path, lengths_file, *BATCH, "--lookahead", 2, *arguments)["policies"])

    tokens = ["stock", "packed", "balance-data"]
    assert names() == [*tokens, "balance-data, look-ahead 2"]
    assert names("--model", "Qwen3-8B") == [*tokens, "by-flops", "by-flops, dynamic CP", "by-flops, look-ahead 2"]
    assert names("--cost", calibration_file) == [*tokens, "calibrated", "calibrated, look-ahead 2"]
    both = ["by-flops", "calibrated", "calibrated, dynamic CP", "calibrated, look-ahead 2"]
    assert names("--model", "Qwen3-8B", "--cost", calibration_file) == [*tokens, *both]


def test_training_understands_every_policys_flags(lengths_file: Path, calibration_file: Path, tmp_path: Path) -> None:
    arguments = ["--model", "Qwen3-8B", "--cost", calibration_file, "--objective", "microbatch"]
    content = figures_of(tmp_path, lengths_file, *BATCH, *arguments, "--algorithm", "greedy")
    parser = argparse.ArgumentParser()
    parser.add_argument("--calculate-per-token-loss", action="store_true")
    add_balance_args(parser)
    configs = {
        name: BalanceConfig.from_megatron_args(
            parser.parse_args([*figures["flags"].split(), "--calculate-per-token-loss"])
        )
        for name, figures in content["policies"].items()
    }
    assert configs["stock"] == BalanceConfig()
    assert configs["packed"] == BalanceConfig(use_dynamic_batch_size=True, max_tokens_per_gpu=8192)
    assert configs["by-flops"].balance_by_flops
    ahead = configs["calibrated, look-ahead 4"]
    assert (ahead.calibration, ahead.lookahead, ahead.objective, ahead.algorithm) == (
        str(calibration_file),
        4,
        "microbatch",
        "greedy",
    )


@pytest.mark.parametrize("ranks", [["--ep-size", 4], ["--pp-size", 4], ["--ep-size", 2, "--pp-size", 2]])
def test_each_objective_is_seen_and_the_one_that_holds_is_marked(
    lengths_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], ranks: list[object]
) -> None:
    content = figures_of(tmp_path, lengths_file, *BATCH, *ranks, "--model", "Qwen3-30B-A3B", "--steps", 3)
    marked = "pipeline*" if "--pp-size" in ranks else "micro-batch*"
    assert marked in capsys.readouterr().out
    balanced, stock = content["policies"]["by-flops"], content["policies"]["stock"]
    assert balanced["speedup"] > 1.1
    key = {"pipeline*": "pipeline_imbalance", "micro-batch*": "microbatch_imbalance"}[marked]
    assert balanced[key] < stock[key]


def test_headroom_is_that_of_the_fullest_micro_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_lengths(tmp_path, 10, 10, 150, 10, 10, 10, 10, 10)
    arguments = [file, "--global-batch-size", 4, "--dp-size", 2, "--max-tokens-per-gpu", 100]
    policies = figures_of(tmp_path, *arguments)["policies"]
    assert policies["balance-data"]["cap_headroom"] == pytest.approx(-0.5)
    printed = capsys.readouterr().out
    assert "1 samples are longer than the cap" in printed
    assert "CP 2 holds it under the cap, or cut it at 100 tokens" in printed


def test_a_cap_that_is_little_too_small_is_raised_to_the_longest_sample(tmp_path: Path) -> None:
    file = write_lengths(tmp_path, 5000, 40, 50, 40)
    arguments = [file, "--global-batch-size", 4, "--dp-size", 2, "--max-tokens-per-gpu", 4096]
    advice = figures_of(tmp_path, *arguments)["recommendation"]
    assert advice["max_tokens_per_gpu"] == 5120
    assert "--max-tokens-per-gpu 5120" in advice["sentences"][0] or not advice["flags"]


def test_equal_lengths_are_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_lengths(tmp_path, *[4096] * 64)
    arguments = [file, "--global-batch-size", 32, "--dp-size", 4, "--max-tokens-per-gpu", 4096]
    advice = figures_of(tmp_path, *arguments, "--model", "Qwen3-8B")["recommendation"]
    assert (advice["policy"], advice["flags"], advice["speedup"]) == ("stock", "", 1.0)
    assert "Leave balancing off" in capsys.readouterr().out


def test_advice_takes_the_fewest_flags_that_are_as_fast(lengths_file: Path, tmp_path: Path) -> None:
    content = figures_of(tmp_path, lengths_file, *BATCH, "--model", "Qwen3-8B")
    advice, policies = content["recommendation"], content["policies"]
    chosen = policies[advice["policy"]]
    assert advice["flags"] == chosen["flags"]
    assert advice["speedup"] == chosen["speedup"]
    fastest = max(figures["speedup"] for figures in policies.values())
    assert chosen["speedup"] >= 0.99 * fastest
    for simpler in list(policies)[: list(policies).index(advice["policy"])]:
        assert policies[simpler]["speedup"] < 0.99 * fastest
    assert f"{advice['speedup']:.2f}x the speed of stock" in advice["sentences"][0]


def test_a_sample_that_outweighs_a_rank_is_told_with_what_lifts_it(tmp_path: Path) -> None:
    file = write_lengths(tmp_path, *[32000, *[1000] * 31] * 4)
    arguments = [file, "--global-batch-size", 32, "--dp-size", 8, "--max-tokens-per-gpu", 32768, "--lookahead", 1]
    content = figures_of(tmp_path, *arguments, "--model", "Qwen3-8B")
    advice = content["recommendation"]
    assert advice["floor_worst"] == pytest.approx(advice["floor_mean"])
    # No plan is below the floor.
    assert content["policies"]["by-flops"]["step_imbalance"] >= advice["floor_worst"] * 0.99
    assert advice["cp_size"] == 8
    # All eight GPUs then share what one ran: as much faster as it was slow.
    assert advice["cp_speedup"] == pytest.approx(content["policies"]["by-flops"]["step_imbalance"], rel=0.05)
    assert any("CP 8 on the same GPUs would lift the floor" in sentence for sentence in advice["sentences"])
    # So do sizes of their own.
    assert advice["policy"] == "by-flops, dynamic CP"
    assert advice["flags"].endswith("--balance-by-flops --balance-context-parallel")
    assert advice["dynamic_cp_speedup"] == pytest.approx(advice["cp_speedup"], rel=0.05)


SHAPE = ModelShape.preset("Qwen3-8B")
FLOPS = CostModel.from_shape(SHAPE, microbatch_tokens=MICROBATCH_TOKENS)
SIZES = ["--global-batch-size", 64, "--dp-size", 4, "--cp-size", 2, "--max-tokens-per-gpu", 4096, "--model", "Qwen3-8B"]


def received_flops(gigabytes_per_second: float) -> int:
    """One token's keys, values and their gradients in bf16, three passes, at 400 TFLOP/s."""
    nbytes = 3 * SHAPE.num_layers * 2 * SHAPE.num_query_groups * SHAPE.kv_channels * 2
    return round(nbytes * 400e12 / (gigabytes_per_second * 1e9))


def leaf_cost(lengths: np.ndarray, *, exchange: int) -> int:
    schedule = build_data_schedule(
        lengths,
        cost_model=replace(FLOPS, cp_exchange=exchange),
        topology=Topology(4, cp_size=2, dynamic_cp=True),
        limits=Limits(4096),
    )
    return schedule.predicted_cost << schedule.cost_shift


def rank_cost(lengths: np.ndarray, *, exchange: int) -> float:
    """The slowest rank of two GPUs under by-flops, on each of them: half of its samples, and what it receives."""
    topology = Topology(4, cp_size=2)
    schedule = build_data_schedule(
        lengths, cost_model=FLOPS, topology=topology, limits=Limits(4096), home_ranks=np.arange(64) % 4
    )
    padded = topology.padded_seq_len(lengths).tolist()
    return max(
        sum(
            FLOPS.per_microbatch + sum((FLOPS(padded[sample]) + exchange * padded[sample]) / 2 for sample in ids)
            for ids in slots
        )
        for slots in schedule.ranks
    )


@pytest.mark.parametrize(("arguments", "bandwidth"), [([], 450), (["--cp-bandwidth", 20], 20)])
def test_dynamic_sizes_are_judged_like_one_size(
    lengths_file: Path, tmp_path: Path, arguments: list[object], bandwidth: float
) -> None:
    policies = figures_of(tmp_path, lengths_file, *SIZES, *arguments)["policies"]
    lengths = np.load(lengths_file)
    batches = [lengths[64 * step :][:64] for step in range(lengths.size // 64)]
    for key, exchange in (("speedup", received_flops(bandwidth)), ("free_speedup", 0)):
        gain = policies["by-flops, dynamic CP"][key] / policies["by-flops"][key]
        dynamic = sum(leaf_cost(batch, exchange=exchange) for batch in batches)
        assert gain == pytest.approx(sum(rank_cost(batch, exchange=exchange) for batch in batches) / dynamic)
    assert policies["by-flops"]["mean_cp_size"] == 2
    assert policies["by-flops, dynamic CP"]["mean_cp_size"] < 2


def test_seconds_of_dynamic_sizes_are_those_of_a_leaf(lengths_file: Path, tmp_path: Path) -> None:
    speed = ["--peak-tflops", 1000, "--efficiency", 0.4]
    figures = figures_of(tmp_path, lengths_file, *SIZES, *speed)["policies"]["by-flops, dynamic CP"]
    lengths = np.load(lengths_file)
    costs = [leaf_cost(lengths[64 * step :][:64], exchange=received_flops(450)) for step in range(lengths.size // 64)]
    assert figures["seconds_per_step"] == pytest.approx(np.mean(costs) / 400e12)


def test_dynamic_sizes_in_seconds_of_a_calibration(lengths_file: Path, calibration_file: Path, tmp_path: Path) -> None:
    policies = figures_of(tmp_path, lengths_file, *SIZES, "--cost", calibration_file, "--tp-size", 2)["policies"]
    nbytes = 3 * SHAPE.num_layers * 2 * SHAPE.num_query_groups * SHAPE.kv_channels * 2
    exchange = round(nbytes / 50e9 / 2 * 1e18)  # sixteen GPUs, so several nodes; two hold the heads
    cost_model = replace(Calibration.read(calibration_file).cost_model(model_parallel_size=2), cp_exchange=exchange)
    lengths = np.load(lengths_file)
    schedules = [
        build_data_schedule(
            lengths[64 * step :][:64],
            cost_model=cost_model,
            topology=Topology(4, cp_size=2, tp_size=2, dynamic_cp=True),
            limits=Limits(4096),
        )
        for step in range(lengths.size // 64)
    ]
    seconds = np.mean([schedule.predicted_cost << schedule.cost_shift for schedule in schedules]) / 1e18
    assert policies["calibrated, dynamic CP"]["seconds_per_step"] == pytest.approx(seconds)
    # A micro-batch takes its 2 ms at one size as well, and a token what a quarter of the model takes.
    assert policies["stock"]["seconds_per_step"] > 16 * 2e-3


def test_dynamic_sizes_are_recommended_for_more_than_noise_alone(
    lengths_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [lengths_file, *SIZES, "--lookahead", 1]
    slow = figures_of(tmp_path, *arguments, "--cp-bandwidth", 20)["recommendation"]
    assert slow["policy"] == "by-flops, dynamic CP"
    assert slow["dynamic_cp_speedup"] > 1.05
    printed = capsys.readouterr().out
    assert "--balance-context-parallel (objective step" in printed
    assert re.search(r"ranks share a token on average, not 2, and receive less", printed)
    fast = figures_of(tmp_path, *arguments, "--cp-bandwidth", 900)["recommendation"]
    assert fast["policy"] == "by-flops"
    assert fast["dynamic_cp_speedup"] < 1.05
    assert "--balance-context-parallel" not in fast["flags"]


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        ("DeepSeek-V3", []),  # multi-latent attention
        ("gpt-oss-20b", []),  # sliding windows
        ("Qwen3-8B", ["--objective", "microbatch"]),
        ("Qwen3-8B", ["--algorithm", "greedy"]),
    ],
)
def test_what_training_refuses_is_not_compared(
    lengths_file: Path, tmp_path: Path, model: str, arguments: list[object]
) -> None:
    policies = figures_of(tmp_path, lengths_file, *BATCH, "--model", model, "--steps", 1, *arguments)["policies"]
    assert "by-flops" in policies
    assert not [name for name in policies if "dynamic" in name]


def test_a_sweep_of_sizes_shows_dynamic_ones_beside_each(lengths_file: Path, tmp_path: Path) -> None:
    arguments = [lengths_file, "--global-batch-size", 64, "--dp-size", 2, "--max-tokens-per-gpu", 8192]
    sweep = figures_of(tmp_path, *arguments, "--model", "Qwen3-8B", "--sweep", "cp_size=1,4")["sweep"]
    for point, size in zip(sweep["points"], (1, 4), strict=True):
        by_name = {figures["name"]: figures for figures in point["policies"]}
        assert by_name["by-flops"]["mean_cp_size"] == size
        assert by_name["by-flops, dynamic CP"]["mean_cp_size"] < 4
        # At one size every token pays for it.
        lost = (
            by_name["by-flops"]["tokens_per_second_per_gpu"]
            / by_name["by-flops, dynamic CP"]["tokens_per_second_per_gpu"]
        )
        assert lost < 1 if size == 4 else lost == pytest.approx(1, rel=0.02)


def test_look_ahead_keeps_every_sample_and_its_rank() -> None:
    generator = np.random.default_rng(0)
    batches = [GlobalBatch(generator.integers(1, 10**6, size=16)) for _ in range(6)]
    topology = Topology(4)
    ahead = look_ahead(batches, window=3, cost_model=CostModel.tokens(), topology=topology)
    home_of = {
        length: home
        for batch in batches
        for length, home in zip(batch.segment_lengths.tolist(), batch.home_ranks(4).tolist(), strict=True)
    }
    step_of = {length: step for step, batch in enumerate(batches) for length in batch.segment_lengths.tolist()}
    assert [batch.num_samples for batch in ahead] == [16] * 6
    seen: set[int] = set()
    for step, batch in enumerate(ahead):
        for length, home in zip(batch.segment_lengths.tolist(), batch.home_ranks(4).tolist(), strict=True):
            assert home == home_of[length]
            assert abs(step - step_of[length]) <= 2
            seen.add(length)
    assert seen == set(home_of)
    same = look_ahead(batches, window=1, cost_model=CostModel.tokens(), topology=topology)
    assert [sorted(batch.segment_lengths) for batch in same] == [sorted(batch.segment_lengths) for batch in batches]


def test_look_ahead_keeps_the_segments_of_a_sample_together() -> None:
    batches = [
        GlobalBatch(np.array([1, 2, 30, 4]), num_segments=np.array([2, 1, 1])),
        GlobalBatch(np.array([50, 6, 7, 8]), num_segments=np.array([1, 2, 1])),
    ]
    ahead = look_ahead(batches, window=2, cost_model=CostModel.tokens(), topology=Topology(2))
    samples = sorted(
        tuple(part.tolist())
        for batch in ahead
        for part in np.split(batch.segment_lengths, np.cumsum(batch.num_segments)[:-1])
    )
    assert samples == [(1, 2), (4,), (6, 7), (8,), (30,), (50,)]


def write_record(
    folder: Path, *, seconds_per_flop: float | None = None, batch_sizes: tuple[int, ...] = (64,) * 4
) -> Path:
    """A run by tokens, first fit, judged by FLOPs; measured as its FLOPs say, one rank slower by a half."""
    info = RunInfo(
        topology=Topology(4),
        limits=Limits(4096),
        cost_model=resolve_cost("flops", model="Qwen2.5-0.5B"),
        cost_name="flops",
        objective="step",
        policy="--balance-data",
    )
    generator = np.random.default_rng(3)
    plans = PlanWriter(folder, info=info)
    writers = [SecondsWriter(folder, dp_rank=rank) for rank in range(4)]
    for index, size in enumerate(batch_sizes):
        schedule = build_data_schedule(
            generator.lognormal(6, 1, size).astype(np.int64).clip(8, 4000),
            cost_model=info.cost_model,
            topology=info.topology,
            limits=info.limits,
            algorithm="first_fit",
            home_ranks=np.sort(np.arange(size) % 4),
        )
        plans.add(StepRecord.of_schedule(schedule, iteration=index + 1))
        if seconds_per_flop is not None:
            for rank, writer in enumerate(writers):
                costs = schedule.cost_grid[rank] * 2.0**schedule.cost_shift
                writer.add(index + 1, seconds=costs * seconds_per_flop)
    plans.flush()
    for writer in writers:
        writer.flush()
    return folder


def test_a_recorded_run_is_replayed_as_it_was_and_under_every_policy(tmp_path: Path) -> None:
    folder = write_record(tmp_path / "record")
    content = figures_of(tmp_path, folder)
    policies = content["policies"]
    assert list(policies)[:5] == ["stock", "as it ran", "packed", "balance-data", "by-flops"]
    assert content["num_steps"] == 4
    assert content["topology"]["dp_size"] == 4
    # The run was planned like --balance-data, but by FLOPs.
    assert 1 < policies["as it ran"]["speedup"] <= policies["by-flops"]["speedup"] * 1.001
    assert not content["rate"]["is_absolute"]
    assert content["measured_imbalance"] is None


def test_as_it_ran_has_the_figures_of_its_plan(tmp_path: Path) -> None:
    folder = write_record(tmp_path / "record", batch_sizes=(64,))
    schedule = build_data_schedule(
        np.random.default_rng(3).lognormal(6, 1, 64).astype(np.int64).clip(8, 4000),
        cost_model=resolve_cost("flops", model="Qwen2.5-0.5B"),
        topology=Topology(4),
        limits=Limits(4096),
        algorithm="first_fit",
        home_ranks=np.sort(np.arange(64) % 4),
    )
    expected = schedule_metrics(schedule)
    ran = figures_of(tmp_path, folder)["policies"]["as it ran"]
    assert ran["step_imbalance"] == expected.step_imbalance
    assert ran["cap_headroom"] == expected.cap_headroom
    assert ran["over_bound"] == pytest.approx(expected.over_bound - 1)


def test_a_measured_run_gives_seconds_to_every_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_record(tmp_path / "record", seconds_per_flop=1e-14)
    content = figures_of(tmp_path, folder)
    assert "Measured in the run: slowest over mean" in capsys.readouterr().out
    assert content["rate"]["is_absolute"]
    assert content["rate"]["seconds_per_cost"] == pytest.approx(1e-14, rel=1e-4)
    ran = content["policies"]["as it ran"]
    assert content["measured_imbalance"] == pytest.approx(ran["step_imbalance"], rel=1e-4)
    # The same lengths by another model's FLOPs: seconds stay those that were measured.
    other = figures_of(tmp_path, folder, "--model", "Qwen3-8B")
    assert other["policies"]["as it ran"]["seconds_per_step"] == pytest.approx(ran["seconds_per_step"], rel=0.2)


def test_a_record_keeps_who_loaded_what_until_ranks_change(tmp_path: Path) -> None:
    folder = write_record(tmp_path / "record")
    kept = figures_of(tmp_path, folder)["policies"]["packed"]["step_imbalance"]
    dealt = tmp_path / "dealt.npy"
    generator = np.random.default_rng(3)
    np.save(dealt, np.concatenate([generator.lognormal(6, 1, 64).astype(np.int64).clip(8, 4000) for _ in range(4)]))
    arguments = ["--global-batch-size", 64, "--max-tokens-per-gpu", 4096, "--model", "Qwen2.5-0.5B"]
    anew = figures_of(tmp_path, dealt, "--dp-size", 4, *arguments)["policies"]["packed"]["step_imbalance"]
    assert kept != anew
    eight = figures_of(tmp_path, folder, "--dp-size", 8)["policies"]
    assert "as it ran" not in eight
    expected = figures_of(tmp_path, dealt, "--dp-size", 8, *arguments)["policies"]
    assert eight["packed"]["step_imbalance"] == expected["packed"]["step_imbalance"]


def test_steps_of_unlike_size_cannot_be_looked_ahead(tmp_path: Path) -> None:
    folder = write_record(tmp_path / "record", batch_sizes=(64, 60))
    assert list(figures_of(tmp_path, folder)["policies"])[-1] == "by-flops"


def test_texts_are_counted_once(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": "a " * count}) + "\n" for count in (6, 1, 4, 1)))
    saved = tmp_path / "saved.npy"
    batch = ["--global-batch-size", 4, "--dp-size", 2, "--max-tokens-per-gpu", 8, "--lookahead", 1]
    from_text = figures_of(tmp_path, data, "--tokenizer", tmp_path, *batch, "--save-lengths", saved)
    assert np.load(saved).tolist() == [6, 1, 4, 1]
    from_lengths = figures_of(tmp_path, saved, *batch)
    for name, figures in from_text["policies"].items():
        assert {**figures, "plan_seconds": 0} == {**from_lengths["policies"][name], "plan_seconds": 0}


def test_a_sweep_compares_per_gpu(lengths_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [lengths_file, "--global-batch-size", 64, "--max-tokens-per-gpu", 8192, "--model", "Qwen3-8B"]
    sweep = figures_of(tmp_path, *arguments, "--sweep", "dp_size=2,8", "--sweep", "cp_size=1,2")["sweep"]
    assert [point["values"] for point in sweep["points"]] == [[2, 1], [2, 2], [8, 1], [8, 2]]
    assert [point["num_gpus"] for point in sweep["points"]] == [2, 4, 8, 16]
    printed = capsys.readouterr().out
    assert "stock at the first point = 1" in printed
    # Fewer ranks wait less, and receive less.
    assert re.search(
        r"Most tokens per GPU, predicted with that of context-parallel ranks: dp_size 2, cp_size 1 with by-flops",
        printed,
    )
    # A point is what compare says there.
    alone = figures_of(tmp_path, *arguments, "--dp-size", 8, "--cp-size", 2, "--lookahead", 1)["policies"]
    for figures in sweep["points"][3]["policies"]:
        assert {**figures, "plan_seconds": 0} == {**alone[figures["name"]], "plan_seconds": 0}


def test_the_smallest_of_caps_that_are_alike_is_best(
    lengths_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [lengths_file, "--global-batch-size", 64, "--dp-size", 4]
    # All that fits at 60000 fits into one micro-batch already.
    assert compare(*arguments, "--sweep", "max_tokens_per_gpu=2000000,60000,1000000") == 0
    assert "max_tokens_per_gpu 60000 with balance-data" in capsys.readouterr().out


def test_the_chart_is_one_file_with_the_tables_numbers(lengths_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    out = tmp_path / "sweep.html"
    arguments = [lengths_file, *BATCH, "--sweep", "dp_size=2,4", "--sweep", "max_tokens_per_gpu=4096,8192"]
    content = figures_of(tmp_path, *arguments, "--model", "Qwen3-8B", "--peak-tflops", 989, "--chart", out)
    page = out.read_text()
    assert "<script src" not in page
    assert "by-flops, max_tokens_per_gpu 8192" in page
    # plotly writes its traces as JSON: the last throughput of the last line is among them.
    drawn = {float(number) for number in re.findall(r"\d+\.\d+", page[page.rindex("Plotly.newPlot") :])}
    for point in content["sweep"]["points"]:
        for figures in point["policies"]:
            assert figures["tokens_per_second_per_gpu"] in drawn


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.npy", *BATCH], "missing.npy does not exist"),
        (["synthetic:gsm8k_sft"], "--global-batch-size, --dp-size, --max-tokens-per-gpu missing"),
        (["synthetic:gsm8k_sft", *BATCH, "--sweep", "tp_size=2"], "--sweep is 'tp_size=2': it must be NAME="),
        (["synthetic:gsm8k_sft", *BATCH, "--sweep", "dp_size=2,x"], "its values must be integers"),
        (["synthetic:gsm8k_sft", *BATCH, "--sweep", "dp_size="], "its values must be integers"),
        (["synthetic:gsm8k_sft", *BATCH, "--sweep", "dp_size=2", "--sweep", "dp_size=4"], "one or two different"),
        (["synthetic:gsm8k_sft", *BATCH, "--chart", "x.html"], "--chart x.html draws a sweep"),
        (["synthetic:gsm8k_sft", *BATCH, "--sweep", "dp_size=2", "--chart", "no/such/x.html"], "--chart is"),
        (["synthetic:gsm8k_sft", *BATCH, "--lookahead", "2,0"], "--lookahead is '2,0'"),
        (["synthetic:gsm8k_sft", *BATCH, "--peak-tflops", "989"], "the cost is tokens, not FLOPs: add --model"),
        (["synthetic:gsm8k_sft", *BATCH, "--efficiency", "0.4"], "--peak-tflops, which is missing"),
        (["synthetic:gsm8k_sft", *BATCH, "--model", "Qwen3-8B", "--peak-tflops", "-1"], "--peak-tflops is -1.0"),
        (["synthetic:gsm8k_sft", *BATCH, "--model", "Nobody-1B"], "the model (--model) is 'Nobody-1B'"),
        (["synthetic:gsm8k_sft", *BATCH, "--steps", "0"], "--steps is 0"),
        (["synthetic:gsm8k_sft", *BATCH, "--json", "no/such/x.json"], "--json is"),
        (["synthetic:gsm8k_sft", *BATCH, "--save-lengths", "no/such/x.npy"], "--save-lengths is"),
        (["tests", *BATCH], "'tests' is no record of a run"),
    ],
)
def test_an_error_is_one_line_and_status_2(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(*arguments) == 2
    message = capsys.readouterr().err
    assert message.startswith("megatron-balance: ")
    assert message.count("\n") == 1
    assert said in message


def test_errors_of_records_name_what_would_be_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_record(tmp_path / "record")
    assert compare(folder, "--global-batch-size", 8) == 2
    assert "steps are fixed" in capsys.readouterr().err
    assert compare(folder, "--ep-size", 2) == 2
    assert "add --model, or --cost calibration.json" in capsys.readouterr().err
    assert compare(folder, "--ep-size", 2, "--model", "Qwen3-30B-A3B") == 0


def test_debug_shows_where_an_error_comes_from() -> None:
    with pytest.raises(ValueError, match="does not exist"):
        compare("missing.npy", *BATCH, "--debug")


def test_a_hundred_thousand_lengths_are_all_planned(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--global-batch-size", 1000, "--dp-size", 2, "--max-tokens-per-gpu", 65536, "--lookahead", 1]
    assert compare("synthetic:gsm8k_sft:100000", *arguments) == 0
    printed = capsys.readouterr().out
    assert "100 steps of 1000 samples" in printed
    assert re.search(r"Compared 3 policies on 100000 samples in \d+\.\d s \(\d+\.\d s of CPU\)", printed)


def test_fewer_are_planned_where_plans_are_dear_and_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--global-batch-size", 4096, "--dp-size", 4, "--max-tokens-per-gpu", 65536, "--lookahead", 1]
    arguments += ["--ep-size", 2, "--model", "Qwen3-30B-A3B"]
    assert compare("synthetic:gsm8k_sft:8192", *arguments) == 0
    assert "Planned are the first 1 of 2 steps; --steps 2 for all." in capsys.readouterr().out


def test_help_says_what_each_number_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        compare("--help")
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    for part in ["examples:", "tokens/s/GPU", "step s", "over bound", "headroom", "policies", "sweep:", "Qwen3-8B"]:
        assert part in printed


def test_the_shell_is_told_what_may_follow(tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    line = "megatron-balance compare --max"
    answer = tmp_path / "answer"
    environment = {
        **os.environ,
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    subprocess.run([sys.executable, "-m", "megatron_balance"], env=environment, check=True, capture_output=True)
    assert answer.read_text().split() == ["--max-tokens-per-gpu"]


def test_a_gain_below_one_percent_is_not_worth_more_flags(tmp_path: Path) -> None:
    arguments = ["synthetic:gsm8k_sft:2560", "--global-batch-size", 64, "--dp-size", 8]
    content = figures_of(tmp_path, *arguments, "--max-tokens-per-gpu", 32768, "--model", "Qwen3-8B")
    chosen = content["policies"][content["recommendation"]["policy"]]
    fastest = max(content["policies"].values(), key=lambda figures: figures["speedup"])
    assert chosen["speedup"] < fastest["speedup"] < 1.01 * chosen["speedup"]
    assert len(chosen["flags"]) < len(fastest["flags"])


def test_a_sweep_of_caps_keeps_who_loaded_what(tmp_path: Path) -> None:
    folder = write_record(tmp_path / "record")
    (point,) = figures_of(tmp_path, folder, "--sweep", "max_tokens_per_gpu=4096")["sweep"]["points"]
    packed = figures_of(tmp_path, folder)["policies"]["packed"]
    assert point["policies"][1]["step_imbalance"] == packed["step_imbalance"]
