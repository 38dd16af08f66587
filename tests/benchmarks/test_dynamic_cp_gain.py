from dataclasses import replace

import numpy as np
import pytest

from benchmarks.dynamic_cp.gain import CAP, GLOBAL_BATCH_SIZE, LONG, SEED, batch_lengths, write_data
from benchmarks.dynamic_cp.gain_report import gains, report
from benchmarks.dynamic_cp.policies import POLICIES, plan, policy_of_step, predicted_cost, shared_cost
from benchmarks.results_file import made_by
from megatron_balance import CostModel, Limits, Topology, build_data_schedule
from megatron_balance.devkit.sft_dataset import SftDataset, jsonl_samples

COST = CostModel(linear=4000, quadratic=8, per_sequence=9000, per_microbatch=10**6, cp_exchange=2500)
TOPOLOGY = Topology(2, cp_size=2, dynamic_cp=True)


def test_policies_take_turns_and_each_is_first_as_often():
    steps = [policy_of_step(step) for step in range(9)]
    rounds = [steps[start : start + 3] for start in (0, 3, 6)]
    assert all(sorted(names) == sorted(POLICIES) for names in rounds)
    assert sorted(names[0] for names in rounds) == sorted(POLICIES)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_a_plan_at_one_size_costs_what_it_costs_without_dynamic_sizes(cp_size):
    rng = np.random.default_rng(0)
    lengths = rng.integers(8, 4000, 40) // 8 * 8  # no padding at any size
    schedule = plan(lengths, cp_size=cp_size, cost_model=COST, topology=TOPOLOGY, limits=Limits(CAP))
    assert {size for sizes in schedule.cp_sizes for size in sizes} == {cp_size}
    static = build_data_schedule(
        lengths,
        cost_model=shared_cost(COST, cp_size=cp_size),
        topology=Topology(4 // cp_size, cp_size=cp_size),
        limits=Limits(CAP),
    )
    assert schedule.ranks[::cp_size] == static.ranks
    assert predicted_cost(schedule) == pytest.approx(static.predicted_cost, rel=1e-4)


def test_sizes_of_their_own_are_the_planners():
    schedule = plan(batch_lengths(), cp_size=None, cost_model=COST, topology=TOPOLOGY, limits=Limits(CAP))
    times = {
        name: predicted_cost(
            plan(batch_lengths(), cp_size=size, cost_model=COST, topology=TOPOLOGY, limits=Limits(CAP))
        )
        for name, size in POLICIES.items()
    }
    assert predicted_cost(schedule) == times["dynamic"] == min(times.values())


def test_every_global_batch_has_the_lengths_in_another_order(tmp_path):
    path = tmp_path / "data.jsonl"
    write_data(path, num_steps=2)
    num_samples = 2 * GLOBAL_BATCH_SIZE
    data = SftDataset(
        jsonl_samples(path, None),
        num_samples=num_samples,
        seq_length=LONG,
        pad_to_seq_length=False,
        pad_token=0,
        seed=SEED,
    )
    lengths = [data.length(index) for index in range(num_samples)]
    first, second = lengths[:GLOBAL_BATCH_SIZE], lengths[GLOBAL_BATCH_SIZE:]
    assert sorted(first) == sorted(second) == sorted(batch_lengths().tolist())
    assert first != second


def test_the_page_gives_the_gain_over_the_better_static_size():
    policies = {
        name: {
            "cpu_seconds": [seconds, seconds + 0.1, seconds],
            "seconds": [4.0],
            "alone_cpu_seconds": [seconds],
            "predicted_seconds": predicted,
            "mean_cp_size": 2.0,
            "loss_difference": 1e-7,
        }
        for name, seconds, predicted in (("CP4", 1.5, 1.4), ("CP2", 1.3, 1.25), ("dynamic", 1.0, 1.0))
    }
    assert gains(policies, "cpu_seconds") == {"CP4": 1.5, "CP2": 1.3}
    names = ("per_microbatch", "per_sequence", "linear", "quadratic", "cp_exchange", "held_out_error")
    names += ("exchange_held_out_error", "exchange_held_out_error_without")
    page = report(made_by("a command", policies=policies, calibration=dict.fromkeys(names, 0.01)))
    assert "Over the better static size it is 1.30× measured (over CP2;" in page
    assert "1.25× predicted (over CP2):\n5.0 points apart" in page


def test_the_exchange_is_part_of_what_a_token_costs_at_one_size():
    whole = shared_cost(replace(COST, linear=4001), cp_size=4)
    assert (whole.linear, whole.quadratic, whole.cp_exchange) == ((4001 + 3 * 2500) // 4, 2, 0)
    assert (whole.per_sequence, whole.per_microbatch) == (COST.per_sequence, COST.per_microbatch)
