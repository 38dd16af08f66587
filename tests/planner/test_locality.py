"""Labels of ranks: against brute force, never dearer, never more tokens moved."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.planner.build import build_data_schedule
from megatron_balance.planner.locality.assignment import (
    assign,
    assign_by_shortest_paths,
    assign_by_subsets,
    assign_greedily,
)
from megatron_balance.planner.locality.relabel import Homes, keep_local
from megatron_balance.planner.metrics import schedule_metrics
from megatron_balance.topology import Limits, Topology

SHARED = CostModel(linear=10, quadratic=1, expert_linear=7, per_microbatch=50)
COST_MODELS = [CostModel.tokens(), CostModel(linear=100, quadratic=1), CostModel(per_sequence=1), SHARED]


def squares(num_parts, high=50):
    row = st.lists(st.integers(0, high), min_size=num_parts, max_size=num_parts)
    return st.lists(row, min_size=num_parts, max_size=num_parts).map(lambda rows: np.array(rows, dtype=np.int64))


def total(benefits, places):
    return int(benefits[np.arange(len(places)), places].sum())


class TestAssignment:
    @settings(max_examples=200, deadline=None)
    @given(st.integers(1, 5).flatmap(lambda n: st.lists(squares(n), min_size=1, max_size=3)))
    def test_exact_ways_find_the_best(self, problems):
        num_parts = problems[0].shape[0]
        of_subsets = assign_by_subsets(np.stack(problems))
        for benefits, places in zip(problems, of_subsets, strict=True):
            best = max(total(benefits, np.array(one)) for one in permutations(range(num_parts)))
            assert sorted(places.tolist()) == list(range(num_parts))
            assert total(benefits, places) == best
            shortest = assign_by_shortest_paths(benefits)
            assert sorted(shortest.tolist()) == list(range(num_parts))
            assert total(benefits, shortest) == best

    @settings(max_examples=40, deadline=None)
    @given(st.integers(6, 8), st.integers(0, 10**6), st.sampled_from([1, 3, 10**9, 2**50]))
    def test_both_exact_ways_agree_where_brute_force_is_slow(self, num_parts, seed, high):
        benefits = np.random.default_rng(seed).integers(0, high + 1, (num_parts, num_parts))
        one, two = assign_by_subsets(benefits[None])[0], assign_by_shortest_paths(benefits)
        assert total(benefits, one) == total(benefits, two)

    @settings(max_examples=100, deadline=None)
    @given(st.integers(1, 6).flatmap(lambda n: st.lists(squares(n, high=5), min_size=1, max_size=3)))
    def test_greedy_takes_the_largest_that_is_left(self, problems):
        num_parts = problems[0].shape[0]
        problem, part, place = np.nonzero(np.stack(problems))
        places = assign_greedily(
            problem * num_parts + part,
            places=problem * num_parts + place,
            benefits=np.stack(problems)[problem, part, place],
            num_parts=num_parts,
            num_problems=len(problems),
        ).reshape(len(problems), num_parts)
        for index, benefits in enumerate(problems):
            left = sorted(
                (-int(benefits[p, q]), p, q) for p in range(num_parts) for q in range(num_parts) if benefits[p, q]
            )
            expected = {}
            for _, p, q in left:
                if p not in expected and q not in expected.values():
                    expected[p] = q
            of_problem = places[index] - index * num_parts
            assert sorted(of_problem.tolist()) == list(range(num_parts))
            assert all(of_problem[p] == q for p, q in expected.items())

    def test_many_parts_are_matched_whole(self):
        benefits = np.random.default_rng(0).integers(0, 3, (2, 100, 100))
        for places in assign(benefits):
            assert sorted(places.tolist()) == list(range(100))


def best_permutation(schedule):
    """Fewest tokens moved over all permutations of ranks, or of the micro-batches of every slot."""
    dp_size, num_microbatches = schedule.topology.dp_size, schedule.num_microbatches
    ranks, slots = schedule.destinations(), schedule.slot_of % num_microbatches
    parts = slots if schedule.objective == "microbatch" else np.zeros_like(slots)
    moved = 0
    for part in np.unique(parts):
        of_part = parts == part
        moved += min(
            int(schedule.lengths[of_part & (np.array(order)[ranks] != schedule.home_ranks)].sum())
            for order in permutations(range(dp_size))
        )
    return moved


@st.composite
def batches(draw, dp_sizes=(2, 3, 4, 8), distinct=False):
    dp_size = draw(st.sampled_from(dp_sizes))
    lengths = draw(st.lists(st.integers(0, 60), min_size=1, max_size=24, unique=distinct))
    homes = draw(st.lists(st.integers(0, dp_size - 1), min_size=len(lengths), max_size=len(lengths)))
    return dp_size, lengths, homes


@settings(max_examples=100, deadline=None)
@given(batches(dp_sizes=(2, 3, 4, 5), distinct=True), st.sampled_from(["step", "microbatch"]))
def test_as_few_tokens_move_as_brute_force_finds(batch, objective):
    dp_size, lengths, homes = batch
    # Lengths differ, so that samples have no equals to change places with.
    options = {"cost_model": COST_MODELS[1], "topology": Topology(dp_size), "limits": Limits(70)}
    plain = build_data_schedule(lengths, objective=objective, home_ranks=homes, relabel=False, **options)
    ours = build_data_schedule(lengths, objective=objective, home_ranks=homes, **options).check()
    assert schedule_metrics(ours).moved_tokens == best_permutation(plain)


@settings(max_examples=300, deadline=None)
@given(
    batches(),
    st.sampled_from(COST_MODELS),
    st.sampled_from(["step", "microbatch", "pipeline"]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([None, 1, 2, 3]),
    st.booleans(),
    st.booleans(),
)
def test_labels_change_no_cost_and_move_no_more(batch, model, objective, ep_size, per_node, fully_sharded, grouped):
    dp_size, lengths, homes = batch
    topology = Topology(
        dp_size,
        ep_size=ep_size if dp_size % ep_size == 0 else 1,
        pp_size=1 + sum(lengths) % 2,
        fully_sharded=fully_sharded,
    )
    options = {"cost_model": model, "topology": topology, "limits": Limits(64), "objective": objective}
    if grouped:
        options["groups"] = [index // 3 for index in range(len(lengths))]
    plain = build_data_schedule(lengths, home_ranks=homes, relabel=False, **options).check()
    ours = build_data_schedule(lengths, home_ranks=homes, ranks_per_node=per_node, **options).check()
    assert ours.predicted_cost == plain.predicted_cost
    # Not the sum alone: every micro-batch cost is still there.
    assert sorted(ours.cost_grid.reshape(-1).tolist()) == sorted(plain.cost_grid.reshape(-1).tolist())
    metrics = schedule_metrics(ours)
    assert metrics.moved_tokens_before_relabel == schedule_metrics(plain).moved_tokens
    assert metrics.moved_tokens <= metrics.moved_tokens_before_relabel
    if per_node is None:
        assert metrics.moved_off_node_tokens is None
    else:
        assert metrics.moved_off_node_tokens <= metrics.moved_tokens


def test_large_problems_go_by_samples_and_agree_on_what_is_obvious(monkeypatch):
    # Every part was loaded whole by another rank: both ways must find it.
    rng = np.random.default_rng(1)
    schedule = build_data_schedule(
        rng.integers(1, 1000, 400),
        cost_model=SHARED,
        topology=Topology(16, ep_size=4),
        limits=Limits(4000),
    )
    groups, inner = rng.permutation(4), rng.permutation(4)
    ranks = schedule.destinations()
    homes = Homes(groups[ranks // 4] * 4 + inner[ranks % 4], tokens=schedule.lengths, ranks_per_node=4)
    for entries in (2**19, 0):
        monkeypatch.setattr("megatron_balance.planner.locality.relabel.MAX_TABLE", entries)
        slot_of = keep_local(
            schedule.problem(), schedule.slot_of, num_microbatches=schedule.num_microbatches, homes=homes
        )
        assert homes.moved_tokens(slot_of // schedule.num_microbatches) == 0


def test_samples_of_one_length_stay_where_they_are():
    schedule = build_data_schedule(
        [100] * 32,
        cost_model=CostModel.tokens(),
        topology=Topology(4),
        limits=Limits(400),
        home_ranks=[index % 4 for index in range(32)],
    ).check()
    assert schedule_metrics(schedule).moved_tokens == 0


def test_what_must_move_stays_on_its_node():
    # Ranks 0 and 1 loaded everything, so half of it goes to the other two ranks, on node 1: no way round that.
    # Ranks 0 and 2 loaded all: then each node keeps its half.
    options = {"cost_model": CostModel.tokens(), "topology": Topology(4), "limits": Limits(400)}
    for homes, off_node in (([0, 1] * 8, 800), ([0, 2] * 8, 0)):
        schedule = build_data_schedule([100] * 16, home_ranks=homes, ranks_per_node=2, **options).check()
        metrics = schedule_metrics(schedule)
        assert metrics.moved_tokens == 800
        assert metrics.moved_off_node_tokens == off_node


def test_two_ranks_in_every_micro_batch_move_less():
    rng = np.random.default_rng(0)
    before = after = 0
    for _ in range(10):
        lengths = np.clip(np.exp(rng.normal(6.4, 1.1, 64)).astype(np.int64), 16, 8192)
        schedule = build_data_schedule(
            lengths,
            cost_model=CostModel(linear=23000, quadratic=1),
            topology=Topology(2),
            limits=Limits(8192),
            objective="microbatch",
            home_ranks=np.arange(64) % 2,
        ).check()
        before += schedule.moved_tokens_before_relabel
        after += schedule_metrics(schedule).moved_tokens
    assert after < 0.8 * before


@pytest.mark.parametrize("ranks_per_node", [0, -1, True])
def test_a_node_has_ranks(ranks_per_node):
    with pytest.raises(BalanceError, match="ranks_per_node is"):
        build_data_schedule(
            [1], cost_model=COST_MODELS[0], topology=Topology(2), limits=Limits(4), ranks_per_node=ranks_per_node
        )
