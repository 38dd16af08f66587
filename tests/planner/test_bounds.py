"""Lower bounds are never above the best plan: brute force over all assignments of a few samples."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.cost.model import CostModel
from megatron_balance.planner.bounds.time import lower_bound, min_num_microbatches, single_sample_floor, slot_floor
from megatron_balance.planner.build import build_data_schedule
from megatron_balance.planner.objectives import OBJECTIVES
from megatron_balance.planner.problem import build_problem
from megatron_balance.topology import Limits, Topology

COST_MODELS = [
    CostModel.tokens(),
    CostModel(linear=5, quadratic=1),
    CostModel(linear=2, quadratic=1, per_sequence=7, per_microbatch=20),
    CostModel(linear=3, expert_linear=9, per_microbatch=4),
]
TOPOLOGIES = {
    "step": [Topology(2), Topology(3), Topology(2, ep_size=2)],
    "microbatch": [
        Topology(2),
        Topology(3, fully_sharded=True),
        Topology(4, ep_size=2),
        Topology(2, ep_size=2),
        Topology(2, ep_size=2, pp_size=2),
    ],
    "pipeline": [Topology(2, pp_size=2), Topology(2, pp_size=3, vpp_size=2), Topology(2, ep_size=2, pp_size=3)],
}


def problem_of(lengths, *, cost_model, topology, limits, objective):
    return build_problem(
        np.array(lengths, dtype=np.int64),
        cost_model=cost_model,
        topology=topology,
        limits=limits,
        objective=OBJECTIVES[objective],
    )


def groupings(weights, capacity, num_bins):
    """All ways to put samples into at most `num_bins` unnamed bins of the capacity, as lists of bin numbers."""

    def extend(choice, used):
        if len(choice) == len(weights):
            yield choice
            return
        weight = weights[len(choice)]
        for index in range(min(len(used) + 1, num_bins)):
            if index == len(used):
                yield from extend([*choice, index], [*used, weight])
            elif used[index] + weight <= capacity:
                yield from extend([*choice, index], [*used[:index], used[index] + weight, *used[index + 1 :]])

    yield from extend([], [])


def best_by_brute_force(problem, num_microbatches):
    """The least predicted cost with this number of micro-batches, over every assignment; None where none fits."""
    num_slots = problem.topology.dp_size * num_microbatches
    best = None
    for choice in groupings(problem.weights.tolist(), problem.capacity, num_slots):
        # Unnamed bins to named slots: all injections, since slots differ by rank and order.
        for slots in permutations(range(num_slots), max(choice, default=-1) + 1):
            slot_of = np.array([slots[index] for index in choice], dtype=np.int64)
            cost = problem.predicted_cost(problem.cost_grid(slot_of, num_microbatches=num_microbatches))
            best = cost if best is None else min(best, cost)
    return best


@st.composite
def small_cases(draw, objective, max_samples):
    lengths = draw(st.lists(st.integers(0, 12), min_size=1, max_size=max_samples))
    topology = draw(st.sampled_from(TOPOLOGIES[objective]))
    limits = draw(st.sampled_from([Limits(8), Limits(10), Limits(16), Limits(micro_batch_size=2)]))
    return lengths, draw(st.sampled_from(COST_MODELS)), topology, limits


@pytest.mark.parametrize("objective", ["step", "microbatch", "pipeline"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_assignment_beats_the_bound_and_no_plan_beats_brute_force(objective, data):
    lengths, cost_model, topology, limits = data.draw(small_cases(objective, 4))
    inputs = {"cost_model": cost_model, "topology": topology, "limits": limits, "objective": objective}
    problem = problem_of(lengths, **inputs)
    schedule = build_data_schedule(lengths, **inputs).check()
    fewest = min_num_microbatches(problem)
    # More micro-batches than samples only add dummies.
    for num_microbatches in range(fewest, min(fewest + 2, 6 // topology.dp_size + 1)):
        best = best_by_brute_force(problem, num_microbatches)
        if best is not None:
            assert lower_bound(problem) <= best
            if num_microbatches == schedule.num_microbatches:
                assert best <= schedule.predicted_cost


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=7), st.sampled_from(COST_MODELS[:3]), st.integers(2, 3))
def test_step_within_a_third_of_brute_force_on_seven_samples(lengths, cost_model, dp_size):
    # Ranks only: with a cap that never binds, a plan is a partition of the samples into ranks.
    inputs = {"cost_model": cost_model, "topology": Topology(dp_size), "limits": Limits(100), "objective": "step"}
    problem = problem_of(lengths, **inputs)
    best = min(
        problem.predicted_cost(problem.cost_grid(np.array(choice, dtype=np.int64), num_microbatches=1))
        for choice in groupings([0] * len(lengths), 1, dp_size)
    )
    schedule = build_data_schedule(lengths, **inputs).check()
    assert lower_bound(problem) <= best <= schedule.predicted_cost
    assert 3 * schedule.predicted_cost <= 4 * best


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=7), st.sampled_from(COST_MODELS[:3]))
def test_microbatch_against_brute_force_on_seven_samples(lengths, cost_model):
    # Two ranks that meet in every slot: bins sorted by cost and cut into pairs are the best rows.
    inputs = {"cost_model": cost_model, "topology": Topology(2), "limits": Limits(14), "objective": "microbatch"}
    problem = problem_of(lengths, **inputs)
    schedule = build_data_schedule(lengths, **inputs).check()
    count = schedule.num_microbatches
    best = None
    for choice in groupings(problem.weights.tolist(), problem.capacity, 2 * count):
        heights = np.zeros(2 * count, dtype=np.int64)
        np.add.at(heights, np.array(choice), problem.costs)
        cost = int(np.sort(heights)[::-1][::2].sum()) + count * problem.per_microbatch
        best = cost if best is None else min(best, cost)
    assert best is not None
    assert lower_bound(problem) <= best <= schedule.predicted_cost
    assert 2 * schedule.predicted_cost <= 3 * best


def test_the_pigeonhole_bound_sees_three_equal_samples_on_two_ranks():
    problem = problem_of(
        [6, 6, 6], cost_model=CostModel.tokens(), topology=Topology(2), limits=Limits(99), objective="step"
    )
    assert lower_bound(problem) == 12


def test_large_samples_that_cannot_share_force_slots_apart():
    # Two ranks, cap 10: three samples of 10 need a slot pair and half of another, which costs 10 as well.
    problem = problem_of(
        [10, 10, 10], cost_model=CostModel.tokens(), topology=Topology(2), limits=Limits(10), objective="microbatch"
    )
    floor = slot_floor(problem, sync_group_size=2)
    assert floor.forced_heights == (10, 10)
    assert lower_bound(problem) == 20


def test_least_number_of_microbatches():
    def fewest(lengths, limits, **topology):
        return min_num_microbatches(
            problem_of(
                lengths,
                cost_model=CostModel.tokens(),
                topology=Topology(2, **topology),
                limits=limits,
                objective="step",
            )
        )

    assert fewest([], Limits(10)) == 1
    assert fewest([5] * 8, Limits(10)) == 2
    assert fewest([6] * 8, Limits(10)) == 4
    assert fewest([99] * 3, Limits(10)) == 2
    assert fewest([5] * 8, Limits(10), microbatch_multiple=3) == 3
    assert fewest([5] * 9, Limits(micro_batch_size=2)) == 3


def test_one_sample_heavier_than_the_mean_rank_sets_the_floor():
    inputs = {"cost_model": CostModel.tokens(), "topology": Topology(4), "limits": Limits(99), "objective": "step"}
    assert single_sample_floor(problem_of([50, 10, 10, 10], **inputs)) == pytest.approx(2.5)
    assert single_sample_floor(problem_of([10] * 8, **inputs)) == 1.0
    assert single_sample_floor(problem_of([0, 0], **inputs)) == 1.0
    assert single_sample_floor(problem_of([], **inputs)) == 1.0


def test_nothing_beside_a_giant_makes_up_for_the_other_rank():
    # Two ranks that meet: beside the 100 the other rank holds at most 60 tokens, so 40 are lost in that slot.
    options = {"cost_model": CostModel(linear=1), "topology": Topology(2, fully_sharded=True), "limits": Limits(60)}
    giant = CostModel(linear=1, quadratic=1)
    problem = problem_of([60] + [1] * 300, objective="microbatch", **{**options, "cost_model": giant})
    # The giant costs 60 + 60**2; sixty ones cost 120. The slot loses the difference, whatever joins it.
    assert lower_bound(problem) == -(-(3660 + 600 + 3660 - 120) // 2)


def test_two_that_share_no_micro_batch_do_not_both_count_for_one():
    # Samples of 51 of 100 tokens stand alone, so the highest slot of two ranks holds two of them, not four.
    problem = problem_of(
        [51] * 6,
        cost_model=CostModel.tokens(),
        topology=Topology(2, fully_sharded=True),
        limits=Limits(100),
        objective="microbatch",
    )
    assert lower_bound(problem) == 153


def test_waiting_ranks_may_do_the_shared_work_of_another_expert_group() -> None:
    model = CostModel(linear=10, quadratic=1, expert_linear=7, per_microbatch=50)
    topology = Topology(4, ep_size=2, fully_sharded=True)
    schedule = build_data_schedule([0, 0, 5, 13, 15, 15, 16], cost_model=model, topology=topology, limits=Limits(64))
    assert schedule.check().predicted_cost == 575
