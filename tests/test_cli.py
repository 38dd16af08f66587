"""The command line: the plan of a policy, help, and what every command says about wrong input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from plan_judge import figures_of_ranks

from megatron_balance import Limits, build_data_schedule
from megatron_balance.cli import main
from megatron_balance.record import read_record

BATCH = ["--global-batch-size", "64", "--dp-size", "4", "--max-tokens-per-gpu", "4096"]


@pytest.fixture
def lengths_file(tmp_path: Path) -> Path:
    file = tmp_path / "lengths.npy"
    np.save(file, np.random.default_rng(0).integers(16, 4000, size=200))
    return file


def test_json_is_a_valid_plan_of_the_lengths_in_file_order(lengths_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.jsonl"
    arguments = ["--model", "Qwen3-8B", "--cp-size", "2", "--pp-size", "2"]
    assert main(["compare", str(lengths_file), *BATCH, *arguments, "--policy", "by-flops", "--json", str(out)]) == 0
    record = read_record(out)
    info, topology = record.info, record.info.topology
    assert (topology.dp_size, topology.cp_size, topology.pp_size) == (4, 2, 2)
    assert info.cost_model.quadratic > 0
    lengths = np.load(lengths_file)
    lines = map(json.loads, out.read_text().splitlines())
    (figures,) = (line for line in lines if line["kind"] == "policy" and line["name"] == "by-flops")
    assert len(record.steps) == 3  # of 64 samples; 8 are left over
    for index, step in enumerate(record.steps):
        assert step.lengths.tolist() == lengths[index * 64 : (index + 1) * 64].tolist()
        ranks = [[[] for _ in range(step.num_microbatches)] for _ in range(4)]
        for sample, place in enumerate(step.slot_of.tolist()):
            ranks[place // step.num_microbatches][place % step.num_microbatches].append(sample)
        metrics = figures_of_ranks(
            ranks, step.lengths, cost_model=info.cost_model, topology=topology, limits=Limits(4096)
        )
        assert metrics.num_over_cap == 0
        assert metrics.num_microbatches == step.num_microbatches
        assert metrics.over_bound <= 3 * (figures["over_bound"] + 1)


def test_a_plan_with_sizes_of_their_own_is_written_whole(lengths_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.jsonl"
    arguments = [*BATCH[:-1], "1024", "--model", "Qwen3-8B", "--cp-size", "2"]
    assert main(["compare", str(lengths_file), *arguments, "--policy", "dynamic-cp", "--json", str(out)]) == 0
    record = read_record(out)
    info = record.info
    assert info.topology.dynamic_cp
    assert info.cost_model.cp_exchange > 0
    for step in record.steps:
        schedule = build_data_schedule(
            step.lengths, cost_model=info.cost_model, topology=info.topology, limits=Limits(1024)
        ).check()
        assert np.array_equal(step.slot_of, schedule.slot_of)
        assert np.array_equal(step.cost_grid, schedule.cost_grid)
        assert np.array_equal(step.cp_size_grid, schedule.cp_size_grid)


def test_the_seed_decides_the_order(lengths_file: Path, tmp_path: Path) -> None:
    def lengths_of(*arguments: str) -> list[list[int]]:
        out = tmp_path / "plan.jsonl"
        assert main(["compare", str(lengths_file), *BATCH, *arguments, "--policy", "stock", "--json", str(out)]) == 0
        return [step.lengths.tolist() for step in read_record(out).steps]

    assert lengths_of("--shuffle", "1") == lengths_of("--shuffle", "1") != lengths_of("--shuffle", "2")
    assert lengths_of("--shuffle") == lengths_of("--shuffle", "0") != lengths_of()


def test_debug_shows_where_an_error_comes_from() -> None:
    with pytest.raises(ValueError, match="does not exist"):
        main(["--debug", "compare", "missing.npy", *BATCH])


@pytest.mark.parametrize("command", ["compare", "report", "fit", "doctor"])
def test_help_shows_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert f"megatron-balance {command} " in capsys.readouterr().out


def test_runs_as_a_module_into_a_closed_pipe() -> None:
    command = [sys.executable, "-m", "megatron_balance", "compare", "synthetic:gsm8k_sft", *BATCH]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert "\x1b[" not in done.stdout
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()
