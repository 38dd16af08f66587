import json
import re
import subprocess
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from benchmarks.planner import scale
from benchmarks.planner.baselines import BASELINES, FROM_WHEELS
from benchmarks.planner.baselines.equal_size_kk import equal_size_kk
from benchmarks.planner.baselines.lpt import lpt
from benchmarks.planner.baselines.next_fit import next_fit
from benchmarks.planner.baselines.pack_first import first_fit_only, first_fit_then_kk, kk_by_flops
from benchmarks.planner.baselines.round_robin import round_robin
from benchmarks.planner.baselines.split_bins import split_bins
from benchmarks.planner.growth import GrowthPoint, growth_exponent
from benchmarks.planner.measure import measure_row
from benchmarks.planner.setups import QUICK_SETUPS, SETUPS, Setup, find_lengths, global_batches
from megatron_balance import Topology

ROOT = Path(__file__).resolve().parents[2]


def toy(dp_size, cap=10, **topology):
    return Setup(
        "toy",
        model="Qwen3-4B",
        topology=Topology(dp_size, **topology),
        max_tokens_per_gpu=cap,
        global_batch_size=8,
        length_names=("gsm8k_sft",),
        num_batches=1,
    )


def plan(baseline, lengths, setup):
    ranks = baseline(np.array(lengths, dtype=np.int64), setup)
    return [[sorted(slot) for slot in slots] for slots in ranks]


def runs_here(name):
    """True if the package of a row is installed: scripts/test_adapters.sh runs these tests where it is."""
    package = "verl" if "verl" in name else "areal"
    return name not in FROM_WHEELS or any(metadata.distributions(name=package))


@pytest.mark.parametrize("name", [name for name in BASELINES if runs_here(name)])
@pytest.mark.parametrize("setup", QUICK_SETUPS, ids=lambda setup: setup.name)
def test_every_sample_is_placed_once_in_as_many_micro_batches_on_each_rank(name, setup):
    for lengths in global_batches(setup, lengths_folder=None):
        ranks = BASELINES[name](lengths, setup)
        assert len(ranks) == setup.topology.dp_size
        assert len({len(slots) for slots in ranks}) == 1
        assert all(slot for slots in ranks for slot in slots)
        ids = sorted(sample for slots in ranks for slot in slots for sample in slot)
        assert ids == list(range(lengths.size))


@pytest.mark.parametrize("name", ["next-fit", "first-fit", "LPT", "ours", "verl 0.9.1", "AReaL"])
@pytest.mark.parametrize("setup", QUICK_SETUPS, ids=lambda setup: setup.name)
def test_rows_that_pack_under_the_cap_never_break_it(name, setup):
    for planner in BASELINES:
        if planner.startswith(name):
            row = measure_row(planner, setup=setup, batches=list(global_batches(setup, lengths_folder=None)))
            assert row.num_failed == 0
            assert row.note == "not installed" or row.num_over_cap == 0


def test_round_robin_takes_samples_in_turn():
    assert plan(round_robin, [5, 1, 1, 1], toy(2)) == [[[0], [2]], [[1], [3]]]


def test_next_fit_never_looks_back_and_deals_micro_batches_in_order():
    # Next-fit: [6], [5 4], [3 7], [2]. First-fit would have put the 3 with the 6.
    assert plan(next_fit, [6, 5, 4, 3, 7, 2], toy(2)) == [[[0], [3, 4]], [[1, 2], [5]]]


def test_next_fit_takes_samples_from_the_back_until_ranks_divide_the_micro_batches():
    # One micro-batch [1 1 1 1] for three ranks: its last two samples run alone.
    assert plan(next_fit, [1, 1, 1, 1], toy(3)) == [[[0, 1]], [[3]], [[2]]]
    with pytest.raises(ValueError, match="2 samples do not fill"):
        plan(next_fit, [1, 1], toy(3))


def test_first_fit_fills_the_first_micro_batch_with_room():
    # First-fit: [6 4], [5 3 2], [7], [8]. Next-fit would have run the 2 with the 8.
    assert plan(first_fit_only, [6, 5, 4, 3, 7, 8, 2], toy(2)) == [[[0, 2], [4]], [[1, 3, 6], [5]]]


def test_kk_on_tokens_deals_as_many_micro_batches_to_each_rank():
    # Micro-batches of 10, 9, 8, 7 tokens: 17 and 17.
    ranks = plan(first_fit_then_kk, [10, 9, 8, 7], toy(2))
    assert sorted(sorted(slots) for slots in ranks) == [[[0], [3]], [[1], [2]]]


def test_kk_by_flops_breaks_the_cap():
    # 16 tokens in two micro-batches of at most 8: attention makes the long sample as costly as many short ones.
    setup = toy(1, cap=81_920, tp_size=2)
    lengths = [65_536, *[4096] * 24]
    (slots,) = plan(kk_by_flops, lengths, setup)
    assert len(slots) == 2
    assert max(sum(lengths[sample] for sample in slot) for slot in slots) > setup.cap


def test_equal_size_kk_gives_each_rank_as_many_samples():
    ranks = plan(equal_size_kk, [9, 1, 1, 1, 1, 1, 1, 1], toy(2))
    assert [sum(map(len, slots)) for slots in ranks] == [4, 4]


def test_lpt_gives_the_long_sample_a_rank_of_its_own():
    lengths = [8000, 2000, 2000, 2000]
    assert sorted(plan(lpt, lengths, toy(2, cap=8000)), key=len) == [[[0]], [[1, 2, 3]]]


def test_split_bins_halves_the_fullest_by_tokens():
    tokens = [5, 4, 3, 2, 9]
    assert split_bins([[0, 1, 2, 3], [4]], tokens=tokens, num_bins=3) == [[0, 3], [4], [1, 2]]
    with pytest.raises(ValueError, match="3 cannot be made"):
        split_bins([[0], [1]], tokens=tokens, num_bins=3)


def test_a_planner_that_raises_is_noted_and_the_others_go_on():
    batches = [np.array([5, 1], dtype=np.int64)]
    row = measure_row("next-fit (Megatron main, dp_balanced)", setup=toy(4), batches=batches)
    assert (row.num_failed, row.mean_over_bound) == (1, None)
    assert row.note == "ValueError on 1 of 1"


def test_setups_are_those_of_the_pull_request():
    first_four = [
        (setup.model, setup.topology.dp_size, setup.max_tokens_per_gpu, setup.global_batch_size, setup.objective)
        for setup in SETUPS[:4]
    ]
    assert first_four == [
        ("Qwen3-4B", 4, 9216, 128, "step"),
        ("Qwen3.5-35B-A3B", 4, 8192, 128, "microbatch"),
        ("Qwen3-4B", 4, 9216, 256, "step"),
        ("Qwen3-30B-A3B", 2, 20480, 256, "microbatch"),
    ]


def test_batches_are_the_same_each_time_and_hold_no_over_long_sample(tmp_path):
    setup = QUICK_SETUPS[0]
    one, other = (np.stack(list(global_batches(setup, lengths_folder=None))) for _ in range(2))
    assert (one == other).all()
    assert one.shape == (setup.num_batches, setup.global_batch_size)
    assert one.max() <= setup.cap
    assert find_lengths(tmp_path) is None


def test_lengths_come_from_files_where_there_are_any(tmp_path):
    np.savez(tmp_path / "code_files.npz", length=np.full(100, 77))
    (batch, _) = global_batches(QUICK_SETUPS[0], lengths_folder=tmp_path)
    assert (batch == 77).all()


def test_growth_exponent_of_n_log_n_is_one():
    points = [GrowthPoint(n, 4, 0.0, n * np.log2(n)) for n in (2**8, 2**12, 2**16)]
    assert growth_exponent(points) == pytest.approx(1.0)


def test_the_whole_benchmark_runs_and_writes_what_it_says(tmp_path):
    command = [str(ROOT / "scripts" / "bench_planner.sh"), "--quick", "--synthetic", "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    results = json.loads((tmp_path / "planner.json").read_text())
    assert len(results["rows"]) == len(QUICK_SETUPS) * len(BASELINES)
    by_planner = {(row["setup"], row["planner"]): row for row in results["rows"]}
    for setup in QUICK_SETUPS:
        row = by_planner[setup.name, "ours"]
        assert row["num_over_cap"] == 0
        stock = by_planner[setup.name, "round-robin (Megatron's sampler)"]
        assert 1.0 <= row["mean_over_bound"] < stock["mean_over_bound"]
    assert results["header"]["command"].startswith("scripts/bench_planner.sh --quick")
    assert [point["num_samples"] for point in results["growth"]["points"]] == [256, 512, 1024]
    assert results["speed_ratios"]
    markdown = (tmp_path / "planner.md").read_text()
    assert all(re.search(rf"^## {re.escape(setup.name)}", markdown, re.MULTILINE) for setup in QUICK_SETUPS)
    assert markdown.count("**ours**") == len(QUICK_SETUPS) + 1

    at_scale = json.loads((tmp_path / "planner_scale.json").read_text())["rows"]
    assert len(at_scale) == len(scale.EXPERTS) * len(scale.STAGES)
    for row in at_scale:
        assert 1.0 <= row["over_bound"] <= row["cheapest_over_bound"]


def test_the_page_on_scale_shows_the_plans_of_a_full_run():
    result = json.loads((ROOT / "benchmarks" / "results" / "planner_scale.json").read_text())
    assert {row["dp_size"] for row in result["rows"]} == set(scale.SIZES)
    assert result["real_lengths"]
    page = (ROOT / "docs" / "scale.md").read_text()
    assert scale.page_table(result) in page
    assert scale.page_table(result, cheapest=True) in page


def test_results_in_the_repository_are_of_a_full_run():
    results = json.loads((ROOT / "benchmarks" / "results" / "planner.json").read_text())
    assert [setup["name"] for setup in results["setups"]] == [setup.name for setup in SETUPS]
    assert len(results["rows"]) == len(SETUPS) * len(BASELINES)
    assert all(row["num_over_cap"] == 0 for row in results["rows"] if row["planner"] == "ours")
    assert max(point["num_samples"] for point in results["growth"]["points"]) == 10**6
