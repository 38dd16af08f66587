"""`megatron-balance compare`: figures that can be checked by hand, and records replayed under every policy."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded_runs import run_info, write_record

from megatron_balance import CostModel, Limits, ModelShape, Topology, build_data_schedule
from megatron_balance.cli import main
from megatron_balance.cost import MICROBATCH_TOKENS, Calibration
from megatron_balance.mcore import add_balance_args

BATCH = ["--global-batch-size", "64", "--dp-size", "4", "--max-tokens-per-gpu", "8192"]
SHAPE = ModelShape.preset("Qwen3-8B")
FLOPS = CostModel.from_shape(SHAPE, microbatch_tokens=MICROBATCH_TOKENS)


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
    arguments = [file, "--global-batch-size", 4, "--dp-size", 2, "--max-tokens-per-gpu", 8]
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
    flops = FLOPS(1024) + FLOPS.per_microbatch
    # Each rank runs one sample, on two GPUs at half of 1e15 FLOPs a second.
    assert stock["seconds_per_step"] == pytest.approx(flops / 1e15)
    assert stock["tokens_per_second_per_gpu"] == pytest.approx(2048 / (flops / 1e15) / 4)


def test_seconds_of_a_calibration_need_no_speed(tmp_path: Path, calibration_file: Path) -> None:
    file = write_lengths(tmp_path, 1000, 1000)
    arguments = [file, "--global-batch-size", 2, "--dp-size", 1, "--max-tokens-per-gpu", 2048]
    policies = figures_of(tmp_path, *arguments, "--cost", calibration_file)["policies"]
    assert policies["stock"]["seconds_per_step"] == pytest.approx(2 * 4e-3)
    assert policies["calibrated"]["seconds_per_step"] == pytest.approx(2e-3 + 2 * 2e-3)


def test_no_seconds_are_shown_where_no_speed_is_known(lengths_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(lengths_file, *BATCH, "--model", "Qwen3-8B") == 0
    printed = capsys.readouterr().out
    assert "tokens/s" not in printed
    assert "for seconds: --peak-tflops" in printed
    assert compare(lengths_file, *BATCH, "--model", "Qwen3-8B", "--peak-tflops", 989) == 0
    assert "40% of 989 TFLOPS, an assumption" in capsys.readouterr().out


def test_policies_are_those_that_can_be_judged(lengths_file: Path, calibration_file: Path, tmp_path: Path) -> None:
    def names(*arguments: object) -> list[str]:
        return list(figures_of(tmp_path, lengths_file, *BATCH, *arguments)["policies"])

    tokens = ["stock", "packed", "balance-data"]
    assert names() == tokens
    assert names("--model", "Qwen3-8B") == [*tokens, "by-flops", "by-flops, dynamic CP"]
    assert names("--cost", calibration_file) == [*tokens, "calibrated"]
    # Sliding windows: training refuses dynamic sizes.
    assert names("--model", "gpt-oss-20b") == [*tokens, "by-flops"]


def test_training_understands_every_policys_flags(lengths_file: Path, calibration_file: Path, tmp_path: Path) -> None:
    arguments = ["--model", "Qwen3-8B", "--cost", calibration_file, "--objective", "microbatch"]
    content = figures_of(tmp_path, lengths_file, *BATCH, *arguments)
    parser = argparse.ArgumentParser()
    parser.add_argument("--calculate-per-token-loss", action="store_true")
    add_balance_args(parser)
    parsed = {
        name: parser.parse_args([*figures["flags"].split(), "--calculate-per-token-loss"])
        for name, figures in content["policies"].items()
    }
    assert vars(parsed["stock"]) == vars(parser.parse_args(["--calculate-per-token-loss"]))
    assert parsed["packed"].max_tokens_per_gpu == 8192
    assert parsed["by-flops"].balance_by_flops
    by_seconds = parsed["calibrated"]
    assert (by_seconds.balance_cost, by_seconds.balance_objective) == (str(calibration_file), "microbatch")


@pytest.mark.parametrize(
    ("ranks", "marked", "key"),
    [
        (["--ep-size", 4], "micro-batch*", "microbatch_imbalance"),
        (["--pp-size", 4], "pipeline*", "pipeline_imbalance"),
        (["--ep-size", 2, "--pp-size", 2], "pipeline*", "pipeline_imbalance"),
    ],
)
def test_each_objective_is_seen_and_the_one_that_holds_is_marked(
    lengths_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], ranks: list[object], marked: str, key: str
) -> None:
    content = figures_of(tmp_path, lengths_file, *BATCH, *ranks, "--model", "Qwen3-30B-A3B", "--steps", 3)
    assert marked in capsys.readouterr().out
    balanced, stock = content["policies"]["by-flops"], content["policies"]["stock"]
    assert balanced["speedup"] > 1.1
    assert balanced[key] < stock[key]


def test_headroom_is_that_of_the_fullest_micro_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_lengths(tmp_path, 10, 10, 150, 10, 10, 10, 10, 10)
    arguments = [file, "--global-batch-size", 4, "--dp-size", 2, "--max-tokens-per-gpu", 100]
    assert figures_of(tmp_path, *arguments)["policies"]["balance-data"]["cap_headroom"] == pytest.approx(-0.5)
    assert "1 samples are longer than the cap" in capsys.readouterr().out


def test_what_is_advised_is_one_of_the_policies(lengths_file: Path, tmp_path: Path) -> None:
    content = figures_of(tmp_path, lengths_file, *BATCH, "--model", "Qwen3-8B")
    advice = content["recommendation"]
    chosen = content["policies"][advice["policy"]]
    assert (advice["flags"], advice["speedup"]) == (chosen["flags"], chosen["speedup"])
    assert advice["speedup"] > 1.1
    assert f"{advice['speedup']:.2f}x the speed of stock" in advice["sentences"][0]
    equal = write_lengths(tmp_path, *[4096] * 64)
    arguments = [equal, "--global-batch-size", 32, "--dp-size", 4, "--max-tokens-per-gpu", 4096]
    advice = figures_of(tmp_path, *arguments, "--model", "Qwen3-8B")["recommendation"]
    assert (advice["policy"], advice["flags"], advice["speedup"]) == ("stock", "", 1.0)


SIZES = ["--global-batch-size", 64, "--dp-size", 4, "--cp-size", 2, "--max-tokens-per-gpu", 4096, "--model", "Qwen3-8B"]


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
    speed = ["--peak-tflops", 1000, "--efficiency", 0.4]
    policies = figures_of(tmp_path, lengths_file, *SIZES, *arguments, *speed)["policies"]
    lengths = np.load(lengths_file)
    batches = [lengths[64 * step :][:64] for step in range(lengths.size // 64)]
    # One token's keys, values and their gradients in bf16, three passes, at 400 TFLOP/s.
    nbytes = 3 * SHAPE.num_layers * 2 * SHAPE.num_query_groups * SHAPE.kv_channels * 2
    exchange = round(nbytes * 400e12 / (bandwidth * 1e9))
    dynamic = [leaf_cost(batch, exchange=exchange) for batch in batches]
    gain = policies["by-flops, dynamic CP"]["speedup"] / policies["by-flops"]["speedup"]
    assert gain == pytest.approx(sum(rank_cost(batch, exchange=exchange) for batch in batches) / sum(dynamic))
    assert policies["by-flops, dynamic CP"]["seconds_per_step"] == pytest.approx(np.mean(dynamic) / 400e12)
    assert policies["by-flops"]["mean_cp_size"] == 2 > policies["by-flops, dynamic CP"]["mean_cp_size"]


def test_a_recorded_run_is_replayed_as_it_was_and_under_every_policy(tmp_path: Path) -> None:
    steps = write_record(tmp_path / "record", num_steps=4, num_samples=64, noise=0.0)
    content = figures_of(tmp_path, tmp_path / "record")
    policies = content["policies"]
    assert list(policies)[:5] == ["stock", "as it ran", "packed", "balance-data", "by-flops"]
    assert (content["num_steps"], content["topology"]["dp_size"]) == (4, 4)
    ran = policies["as it ran"]
    imbalances = [float(ranks.max() / ranks.mean()) for ranks in (step.cost_grid.sum(axis=1) for step in steps)]
    assert ran["step_imbalance"] == pytest.approx(np.mean(imbalances))
    assert ran["speedup"] == pytest.approx(policies["by-flops"]["speedup"], rel=1e-3)
    # Measured as predicted, a nanosecond a unit of cost: so are seconds, of every policy.
    assert content["rate"]["seconds_per_cost"] == pytest.approx(1e-9, rel=1e-4)
    assert content["measured_imbalance"] == pytest.approx(ran["step_imbalance"], rel=1e-4)
    other = figures_of(tmp_path, tmp_path / "record", "--model", "Qwen3-8B")["policies"]["as it ran"]
    assert other["seconds_per_step"] == pytest.approx(ran["seconds_per_step"], rel=0.3)


def test_a_record_keeps_who_loaded_what_until_ranks_change(tmp_path: Path) -> None:
    folder, dealt = tmp_path / "record", tmp_path / "dealt.npy"
    steps = write_record(folder, run_info(cost_name="tokens", cost_model=CostModel.tokens()), measured=False)
    np.save(dealt, np.concatenate([step.lengths for step in steps]))
    arguments = ["--global-batch-size", 48, "--max-tokens-per-gpu", 8192]
    of_ranks = [step.lengths.reshape(4, -1).sum(axis=1) for step in steps]
    kept = figures_of(tmp_path, folder)["policies"]["packed"]["step_imbalance"]
    assert kept == pytest.approx(np.mean([tokens.max() / tokens.mean() for tokens in of_ranks]))
    eight = figures_of(tmp_path, folder, "--dp-size", 8)["policies"]
    assert "as it ran" not in eight
    expected = figures_of(tmp_path, dealt, "--dp-size", 8, *arguments)["policies"]
    assert {name: figures["step_imbalance"] for name, figures in eight.items()} == {
        name: figures["step_imbalance"] for name, figures in expected.items()
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["synthetic:gsm8k_sft", *BATCH, "--peak-tflops", "989"], "the cost is tokens, not FLOPs: add --model"),
        (["synthetic:gsm8k_sft", *BATCH, "--efficiency", "0.4"], "--peak-tflops, which is missing"),
        (["synthetic:gsm8k_sft", *BATCH, "--model", "Qwen3-8B", "--peak-tflops", "-1"], "--peak-tflops is -1.0"),
        (["tests", *BATCH], "'tests' is no record of a run"),
        (["RECORD", "--global-batch-size", "8"], "steps are fixed"),
        (["RECORD", "--ep-size", "2"], "add --model, or --cost seconds.json"),
    ],
)
def test_an_error_is_one_line_and_status_2(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(tmp_path / "record", num_steps=1)
    assert compare(*(word.replace("RECORD", str(tmp_path / "record")) for word in arguments)) == 2
    message = capsys.readouterr().err
    assert message.startswith("megatron-balance: ")
    assert message.count("\n") == 1
    assert said in message
