"""Groups that stay on one rank."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.planner.build import build_data_schedule
from megatron_balance.planner.inputs import number_groups
from megatron_balance.topology import Limits, Topology

FLOPS = CostModel(linear=100, quadratic=1)


def plan(lengths, **options):
    options = {"cost_model": FLOPS, "topology": Topology(2), "limits": Limits(100), **options}
    return build_data_schedule(lengths, **options).check()


def ranks_of_groups(schedule, groups):
    found = {}
    for group, rank in zip(groups, schedule.destinations().tolist(), strict=True):
        found.setdefault(group, set()).add(rank)
    return found


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 130), st.sampled_from("abcdefgh")), max_size=40),
    st.sampled_from([Topology(1), Topology(3), Topology(4, ep_size=2), Topology(2, microbatch_multiple=2)]),
    st.sampled_from([Limits(100), Limits(micro_batch_size=3)]),
    st.sampled_from(["step", "microbatch", "pipeline"]),
    st.sampled_from(["auto", "greedy", "first_fit", "karmarkar_karp"]),
    st.integers(0, 10**6) | st.none(),
)
def test_every_group_is_on_one_rank(samples, topology, limits, objective, algorithm, seed):
    lengths, groups = [length for length, _ in samples], [group for _, group in samples]
    options = {"topology": topology, "limits": limits, "objective": objective, "algorithm": algorithm}
    if seed is not None:
        options["home_ranks"] = np.random.default_rng(seed).integers(0, topology.dp_size, len(lengths))
    schedule = plan(lengths, groups=groups, **options)
    assert all(len(ranks) == 1 for ranks in ranks_of_groups(schedule, groups).values())
    assert plan(lengths, groups=groups, **options).digest() == schedule.digest()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(2, 3))
def test_groups_are_nearly_as_even_as_brute_force_makes_them(sizes, dp_size):
    # Two equal samples a group, and room for all: the step lasts as long as the costliest rank.
    lengths = [size for size in sizes for _ in range(2)]
    schedule = plan(
        lengths,
        groups=[index // 2 for index in range(len(lengths))],
        cost_model=CostModel.tokens(),
        topology=Topology(dp_size),
        limits=Limits(1000),
    )
    best = min(
        max(sum(2 * size for size, rank in zip(sizes, ranks, strict=True) if rank == one) for one in range(dp_size))
        for ranks in product(range(dp_size), repeat=len(sizes))
    )
    assert best <= schedule.predicted_cost <= 1.2 * best


def test_many_groups_are_even():
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(6.4, 1.1, 1024)).astype(np.int64), 16, 8192)
    schedule = plan(lengths, groups=np.arange(1024) // 8, topology=Topology(8), limits=Limits(16384))
    assert schedule.predicted_cost <= 1.01 * schedule.lower_bound


def test_any_ids_will_do_and_need_not_stand_together():
    lengths = [10, 20, 30, 40]
    for groups in (["x", "y", "x", "y"], [7, -3, 7, -3], np.array([5, 2, 5, 2]), np.array(["p", "q", "p", "q"])):
        schedule = plan(lengths, groups=groups)
        assert schedule.ranks == plan(lengths, groups=[0, 1, 0, 1]).ranks
    assert number_groups([]).tolist() == []


def test_a_step_keeps_groups_by_itself():
    lengths = [40, 30, 20, 10, 5]
    assert plan(lengths, groups=[0] * 5, keep_groups="step").digest() == plan(lengths).digest()
    assert plan(lengths, groups=[0] * 5, keep_groups="step").groups is None


def test_fewer_groups_than_ranks_leave_dummies():
    schedule = plan([50, 50, 50], groups=[0, 0, 0], topology=Topology(3))
    assert sorted(sum(map(len, slots)) for slots in schedule.ranks) == [0, 0, 3]


def test_samples_that_stay_home_may_be_groups():
    lengths, homes = [10, 20, 30, 40], [0, 1, 0, 1]
    schedule = plan(lengths, groups=homes, home_ranks=homes, move_samples=False)
    assert schedule.destinations().tolist() == homes


def test_whole_ranks_are_exchanged_to_keep_groups_at_home():
    lengths, groups = [90, 10, 80, 20], [0, 0, 1, 1]
    for homes in ([0, 0, 1, 1], [1, 1, 0, 0]):
        assert plan(lengths, groups=groups, home_ranks=homes).destinations().tolist() == homes


def test_check_sees_a_split_group():
    schedule = plan([7, 5, 4, 4], groups=[0, 1, 2, 0])
    with pytest.raises(AssertionError, match=r"'groups': groups \[0\] are on more than one rank"):
        replace(schedule, groups=np.zeros(4, dtype=np.int64)).check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": [0]}, "groups has 1 ids: it must have one for each of 2 samples"),
        ({"groups": [0, 1], "keep_groups": "node"}, "keep_groups is 'node': it must be one of rank, step"),
        ({"groups": np.zeros((2, 1))}, r"groups has shape \(2, 1\)"),
        ({"groups": [[0], [1]]}, "groups holds an id that cannot be compared"),
        ({"groups": [0, 0], "home_ranks": [0, 1], "move_samples": False}, "1 groups were loaded by more than one"),
    ],
)
def test_wrong_groups_are_named(options, message):
    with pytest.raises(BalanceError, match=message):
        plan([3, 4], **options)
