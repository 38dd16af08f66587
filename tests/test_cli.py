"""`megatron-balance plan`: the table, the plan it writes, and what it says about wrong input."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_balance.cli import main
from megatron_balance.cli.table import plain_table, print_table
from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.planner.build import build_data_schedule
from megatron_balance.planner.metrics import assignment_metrics
from megatron_balance.record.plan_file import read_plan
from megatron_balance.topology import Limits, Topology

BATCH = ["--global-batch-size", "64", "--dp-size", "4", "--max-tokens-per-gpu", "4096"]


def plan(*arguments: str) -> int:
    return main(["plan", *arguments])


@pytest.fixture
def lengths_file(tmp_path: Path) -> Path:
    file = tmp_path / "lengths.npy"
    np.save(file, np.random.default_rng(0).integers(16, 4000, size=200))
    return file


def table_rows(printed: str) -> list[list[str]]:
    """Cells of the plain table: policy, then the figures."""
    lines = printed.splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("policy")) + 2
    rows = []
    for line in lines[first : first + 4]:
        *label, imbalance, over_bound, padding, headroom, num_microbatches, _, milliseconds = line.split()
        rows.append([" ".join(label), imbalance, over_bound, padding, headroom, num_microbatches, milliseconds])
    return rows


def test_table_has_a_row_a_policy_and_ours_is_best(lengths_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(str(lengths_file), *BATCH, "--model", "Qwen3-8B") == 0
    printed = capsys.readouterr().out
    assert "3 steps of 64 samples; 8 left over" in printed
    assert "Cost: flops. Objective: step." in printed
    rows = table_rows(printed)
    assert [row[0].split("(")[-1] for row in rows] == [
        "stock sampler, one sample a micro-batch",
        "--use-dynamic-batch-size)",
        "--balance-data)",
        "--balance-data --balance-by-flops)",
    ]
    imbalances = [float(row[1]) for row in rows]
    assert imbalances[3] <= min(imbalances)
    assert imbalances[3] < 1.02
    # One sample a micro-batch: 64 samples over 4 ranks.
    assert float(rows[0][5]) == 16.0
    assert float(rows[3][5]) < 16.0
    assert "as fast as stock" in printed


def test_json_is_a_valid_plan_of_the_lengths_in_file_order(lengths_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    arguments = ["--model", "Qwen3-8B", "--cp-size", "2", "--microbatch-multiple", "2"]
    assert plan(str(lengths_file), *BATCH, *arguments, "--json", str(out)) == 0
    content = json.loads(out.read_text())
    assert set(content) == {"cost_model", "cost_name", "topology", "limits", "steps"}
    topology = Topology(**content["topology"])
    assert (topology.dp_size, topology.cp_size, topology.microbatch_multiple) == (4, 2, 2)
    windows = tuple(map(tuple, content["cost_model"].pop("windows")))
    cost_model = CostModel(**content["cost_model"], windows=windows)
    assert cost_model.quadratic > 0

    lengths = np.load(lengths_file)
    assert len(content["steps"]) == 3
    for index, step in enumerate(content["steps"]):
        assert step["lengths"] == lengths[index * 64 : (index + 1) * 64].tolist()
        ranks = step["ranks"]
        assert sorted(sample for slots in ranks for ids in slots for sample in ids) == list(range(64))
        assert {len(slots) for slots in ranks} == {step["num_microbatches"]}
        assert step["num_microbatches"] % 2 == 0
        metrics = assignment_metrics(
            ranks, lengths=step["lengths"], cost_model=cost_model, topology=topology, limits=Limits(4096)
        )
        assert metrics.num_over_cap == 0
        assert metrics.predicted_cost == step["metrics"]["predicted_cost"]
        assert step["metrics"]["moved_tokens_unlabelled"] >= step["metrics"]["moved_tokens"]


def test_a_plan_with_sizes_of_their_own_is_written_whole(
    lengths_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    arguments = [*BATCH[:-1], "1024", "--model", "Qwen3-8B", "--cp-size", "2", "--balance-context-parallel", "4"]
    assert plan(str(lengths_file), *arguments, "--json", str(out)) == 0
    content = json.loads(out.read_text())
    topology = Topology(**content["topology"])
    assert (topology.dynamic_cp, topology.max_cp_size) == (True, 4)
    cost_model = CostModel(**{**content["cost_model"], "windows": ()})
    assert cost_model.cp_exchange > 0
    read = read_plan(out)
    for step, written in zip(read.steps, content["steps"], strict=True):
        schedule = build_data_schedule(
            written["lengths"], cost_model=cost_model, topology=topology, limits=Limits(1024)
        ).check()
        assert written["ranks"] == [[list(ids) for ids in slots] for slots in schedule.ranks]
        assert written["cp_sizes"] == [list(sizes) for sizes in schedule.cp_sizes]
        assert written["metrics"]["predicted_cost"] == schedule.predicted_cost << schedule.cost_shift
        assert np.array_equal(step.cost_grid, schedule.cost_grid)
        assert np.array_equal(step.cp_sizes, schedule.cp_size_grid())

    # The table of the first step: groups of each size, and leaves without one.
    printed = capsys.readouterr().out
    assert "FLOPs, dynamic CP" in printed
    schedule = build_data_schedule(
        content["steps"][0]["lengths"], cost_model=cost_model, topology=topology, limits=Limits(1024)
    )
    lines = printed.split("Step 1, groups")[1].splitlines()
    sizes = [int(size) for size in re.findall(r"CP (\d+)", lines[1])]
    for slot in range(schedule.num_microbatches):
        of_slot = [
            (size[slot] if ids[slot] else 0) if slot < len(ids) else 0
            for ids, size in zip(schedule.ranks, schedule.cp_sizes, strict=True)
        ]
        cells = [0 if cell == "." else int(cell) for cell in lines[3 + slot].split()]
        assert cells[1 : 1 + len(sizes)] == [of_slot.count(size) // size for size in sizes]
        assert cells[1 + len(sizes)] == of_slot.count(0)


def test_a_plan_whose_groups_disagree_is_no_plan(lengths_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    arguments = [*BATCH[:-1], "1024", "--model", "Qwen3-8B", "--balance-context-parallel", "--steps", "1"]
    assert plan(str(lengths_file), *arguments, "--json", str(out)) == 0
    content = json.loads(out.read_text())
    (step,) = content["steps"]
    leaf, slot = next(
        (leaf, slot) for leaf, sizes in enumerate(step["cp_sizes"]) for slot, size in enumerate(sizes) if size > 1
    )
    breaks: tuple[Callable[[dict[str, Any]], object], ...] = (
        lambda step: step["cp_sizes"][leaf].__setitem__(slot, 1),
        lambda step: step["cp_sizes"][leaf].__setitem__(slot, 3),
        lambda step: step["ranks"][leaf][slot].clear(),
        lambda step: step["cp_sizes"][leaf].pop(),
    )
    for break_it in breaks:
        content["steps"] = [json.loads(out.read_text())["steps"][0]]
        break_it(content["steps"][0])
        broken = tmp_path / "broken.json"
        broken.write_text(json.dumps(content))
        with pytest.raises(BalanceError, match="is no plan"):
            read_plan(broken)


def test_tokens_are_the_cost_without_a_model(lengths_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(str(lengths_file), *BATCH) == 0
    printed = capsys.readouterr().out
    assert "Cost: tokens." in printed
    assert table_rows(printed)[3][0] == "tokens, level packing (from Python)"


def test_model_may_be_a_config_file(lengths_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert plan(str(lengths_file), *BATCH, "--model", str(tmp_path / "config.json")) == 0
    assert plan(str(lengths_file), *BATCH, "--model", str(tmp_path)) == 0
    assert "Cost: flops." in capsys.readouterr().out


def test_synthetic_lengths_stand_in_for_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("synthetic:gsm8k_sft:130", *BATCH) == 0
    assert "2 steps of 64 samples; 2 left over" in capsys.readouterr().out
    assert plan("synthetic:gsm8k_sft", *BATCH) == 0
    assert "10 steps of 64 samples." in capsys.readouterr().out
    assert plan("synthetic:gsm8k_sft", *BATCH, "--steps", "3") == 0
    assert "3 steps of 64 samples." in capsys.readouterr().out


def test_at_most_a_hundred_steps_unless_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("5\n" * 220)
    arguments = [str(tmp_path / "a.txt"), "--global-batch-size", "2", "--dp-size", "2", "--max-tokens-per-gpu", "16"]
    assert plan(*arguments) == 0
    assert "100 steps of 2 samples; 20 left over" in capsys.readouterr().out
    assert plan(*arguments, "--steps", "110") == 0
    assert "110 steps of 2 samples." in capsys.readouterr().out


def test_seed_and_shuffle_decide_the_order(lengths_file: Path, tmp_path: Path) -> None:
    def lengths_of(*arguments: str) -> list[list[int]]:
        out = tmp_path / "plan.json"
        assert plan(str(lengths_file), *BATCH, *arguments, "--json", str(out)) == 0
        return [step["lengths"] for step in json.loads(out.read_text())["steps"]]

    assert lengths_of("--shuffle", "--seed", "1") == lengths_of("--shuffle", "--seed", "1")
    assert lengths_of("--shuffle", "--seed", "1") != lengths_of("--shuffle", "--seed", "2")
    assert lengths_of("--seed", "1") == lengths_of()


def test_over_long_samples_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("9000\n100\n200\n9001\n")
    assert (
        plan(str(tmp_path / "a.txt"), "--global-batch-size", "4", "--dp-size", "2", "--max-tokens-per-gpu", "512") == 0
    )
    assert "2 samples are longer than a micro-batch's 512 tokens; each runs alone." in capsys.readouterr().out


def test_a_batch_that_ranks_do_not_divide_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("9\n8\n7\n6\n5\n")
    assert (
        plan(str(tmp_path / "a.txt"), "--global-batch-size", "5", "--dp-size", "4", "--max-tokens-per-gpu", "16") == 0
    )
    assert "1 step of 5 samples" in capsys.readouterr().out


@pytest.mark.parametrize("objective", ["auto", "step", "microbatch", "pipeline"])
@pytest.mark.parametrize("algorithm", ["auto", "karmarkar_karp", "greedy", "first_fit"])
def test_every_objective_and_algorithm_by_name(
    lengths_file: Path, capsys: pytest.CaptureFixture[str], objective: str, algorithm: str
) -> None:
    arguments = ["--objective", objective, "--algorithm", algorithm, "--pp-size", "2", "--ep-size", "4"]
    assert plan(str(lengths_file), *BATCH, *arguments, "--model", "Qwen3-30B-A3B", "--steps", "1") == 0
    printed = capsys.readouterr().out
    # Experts are spread over the ranks, so these meet in every micro-batch.
    assert f"Objective: {'microbatch' if objective == 'auto' else objective}." in printed
    if algorithm != "auto":
        assert f"FLOPs, {algorithm} (" in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.npy", *BATCH], "missing.npy does not exist"),
        (["synthetic:nothing", *BATCH], "No synthetic lengths are named 'nothing'; there are alpaca_eval"),
        (["synthetic:gsm8k_sft:many", *BATCH], "must be synthetic:NAME or synthetic:NAME:N"),
        (["synthetic:gsm8k_sft:10", *BATCH], "need 64 lengths, but there are 10"),
        (["synthetic:gsm8k_sft:200", *BATCH, "--steps", "4"], "need 256 lengths, but there are 200"),
        (["synthetic:gsm8k_sft", *BATCH, "--cost", "flops"], "the model is missing (--model)"),
        (["synthetic:gsm8k_sft", *BATCH, "--cost", "flops"], "Qwen3-30B-A3B"),
        (["synthetic:gsm8k_sft", *BATCH, "--model", "Nobody-1B"], "the model (--model) is 'Nobody-1B'"),
        (["synthetic:gsm8k_sft", *BATCH, "--model", "none/config.json"], "cannot be read"),
        (["synthetic:gsm8k_sft", *BATCH, "--steps", "0"], "--steps is 0"),
        (["synthetic:gsm8k_sft", *BATCH, "--seed", "-1"], "--seed is -1"),
        (["synthetic:gsm8k_sft", *BATCH, "--global-batch-size", "0"], "--global-batch-size is 0"),
        (["synthetic:gsm8k_sft", *BATCH, "--dp-size", "0"], "dp_size is 0"),
        (["synthetic:gsm8k_sft", *BATCH, "--dp-size", "six"], "invalid int value: 'six'"),
        (["synthetic:gsm8k_sft", *BATCH, "--algorithm", "magic"], "algorithm is 'magic'"),
        (["synthetic:gsm8k_sft", *BATCH, "--json", "no/such/folder/plan.json"], "--json is"),
        (["synthetic:gsm8k_sft"], "--global-batch-size, --max-tokens-per-gpu, --dp-size"),
    ],
)
def test_an_error_is_one_line_and_status_2(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*arguments) == 2
    message = capsys.readouterr().err
    assert message.startswith("megatron-balance: ")
    assert message.count("\n") == 1
    assert said in message


def test_debug_shows_where_an_error_comes_from() -> None:
    with pytest.raises(ValueError, match="does not exist"):
        plan("missing.npy", *BATCH, "--debug")


def test_help_names_groups_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        plan("--help")
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    for part in ["examples:", "synthetic:NAME[:N]", "ranks, as in Megatron:", "over bound", "Qwen3-8B"]:
        assert part in printed


def test_runs_as_a_module_into_a_closed_pipe() -> None:
    command = [sys.executable, "-m", "megatron_balance", "plan", "synthetic:gsm8k_sft", *BATCH]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert "\x1b[" not in done.stdout
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()


def test_plain_table_aligns_numbers_to_the_right() -> None:
    assert plain_table(("policy", "ms"), [["a", "1.0"], ["longer one", "10.0"]]).splitlines() == [
        "policy        ms",
        "----------  ----",
        "a            1.0",
        "longer one  10.0",
    ]


def test_a_terminal_gets_the_same_cells(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_table(("policy", "ms"), [["a", "1.0"], ["b", "2.0"]])
    printed = capsys.readouterr().out
    assert all(cell in printed for cell in ("policy", "ms", "1.0", "2.0"))
    assert "─" in printed


def test_a_narrow_terminal_cuts_no_cell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "52")
    columns = ("policy", *(f"column{index}" for index in range(5)))
    print_table(columns, [["a long policy", *["12.34"] * 5], ["b", *["1.0"] * 5]], emphasized=0)
    printed = capsys.readouterr().out
    assert "…" not in printed
    assert printed.count("12.34") == 5
