"""The steps of packing by themselves: empty slots, targets and levels of ranks, levels of groups."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.cost.model import CostModel
from megatron_balance.planner.objectives import OBJECTIVES
from megatron_balance.planner.packing.empty_slots import fill_empty
from megatron_balance.planner.packing.group_levels import place_groups
from megatron_balance.planner.packing.rank_levels import place_ranks, target_heights
from megatron_balance.planner.problem import build_problem
from megatron_balance.topology import Limits, Topology

CAP = 100
SHARED = CostModel(linear=10, quadratic=1, expert_linear=7, per_microbatch=50)


def problem_of(lengths, *, topology, objective, cost_model=SHARED):
    return build_problem(
        np.array(lengths, dtype=np.int64),
        cost_model=cost_model,
        topology=topology,
        limits=Limits(CAP),
        objective=OBJECTIVES[objective],
    )


def slot_tokens(problem, placement):
    tokens = np.zeros(problem.topology.dp_size * placement.num_microbatches, dtype=np.int64)
    np.add.at(tokens, placement.slot_of, problem.weights)
    return tokens


def assert_is_a_plan(problem, placement, *, asked):
    """Every sample in a slot that is there, none over the cap with company, no needless dummy, honest costs."""
    num_slots = problem.topology.dp_size * placement.num_microbatches
    counts = np.bincount(placement.slot_of, minlength=num_slots)
    assert counts.size == num_slots
    assert counts.sum() == problem.num_samples
    assert (counts[slot_tokens(problem, placement) > CAP] == 1).all()
    assert placement.num_microbatches >= asked
    if problem.num_samples >= num_slots:
        assert counts.all()
    grid = problem.cost_grid(placement.slot_of, num_microbatches=placement.num_microbatches)
    assert np.array_equal(grid, placement.cost_grid)
    assert placement.predicted_cost == problem.predicted_cost(grid)


class TestEmptySlots:
    @settings(max_examples=100, deadline=None)
    @given(st.data(), st.integers(1, 3), st.integers(1, 4), st.booleans(), st.booleans())
    def test_no_bin_stays_empty_where_there_are_samples_for_it(self, data, num_parts, bins_per_part, across, meet):
        num_bins = num_parts * bins_per_part
        lengths = data.draw(st.lists(st.integers(1, CAP // 8), min_size=1, max_size=3 * num_bins))
        before = np.array([data.draw(st.integers(0, num_bins - 1)) for _ in lengths], dtype=np.int64)
        objective = "microbatch" if meet else "step"
        problem = problem_of(lengths, topology=Topology(num_parts), objective=objective)
        after = fill_empty(problem, before, num_parts=num_parts, bins_per_part=bins_per_part, across=across)
        old, new = (np.bincount(bins, minlength=num_bins) for bins in (before, after))
        assert new[old > 0].all(), "a bin was emptied"
        if not across:
            assert np.array_equal(before // bins_per_part, after // bins_per_part)
            of_parts = np.bincount(before // bins_per_part, minlength=num_parts)
            used = (new.reshape(num_parts, -1) > 0).sum(axis=1)
            assert np.array_equal(used, np.minimum(of_parts, bins_per_part))
        elif len(lengths) >= num_bins:
            assert new.all()

    def test_a_rank_halves_its_costliest_bin_and_a_group_takes_the_cheapest_sample(self):
        lengths, bins = [40, 30, 20, 9], np.array([0, 0, 0, 1])
        alone = problem_of(lengths, topology=Topology(1), objective="step", cost_model=CostModel.tokens())
        assert fill_empty(alone, bins, num_parts=1, bins_per_part=3, across=True).tolist() == [0, 2, 2, 1]
        meet = problem_of(lengths, topology=Topology(3), objective="microbatch", cost_model=CostModel.tokens())
        assert fill_empty(meet, bins, num_parts=1, bins_per_part=3, across=True).tolist() == [0, 0, 2, 1]


class TestRankLevels:
    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(st.integers(0, 130), min_size=1, max_size=60),
        st.integers(1, 4),
        st.integers(1, 5),
        st.sampled_from([0, 5]),
    )
    def test_it_makes_a_plan(self, lengths, dp_size, asked, steepness):
        problem = problem_of(lengths, topology=Topology(dp_size, pp_size=2), objective="pipeline")
        placement = place_ranks(problem, num_microbatches=asked, work=0, steepness=steepness)
        assert_is_a_plan(problem, placement, asked=asked)
        assert len(target_heights(problem, num_microbatches=asked, steepness=steepness)) == asked

    def test_a_forced_height_comes_first_and_the_rest_is_even(self):
        # 90 fits with none of the others, and each of 3 more micro-batches of 2 ranks takes a sixth of 240.
        tokens = CostModel.tokens()
        problem = problem_of([90, 90, *[20] * 12], topology=Topology(2), objective="step", cost_model=tokens)
        assert target_heights(problem, num_microbatches=4) == [90, 40, 40, 40]


class TestGroupLevels:
    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(st.integers(0, 130), min_size=1, max_size=60),
        st.sampled_from([(4, 2, 1), (4, 4, 1), (6, 3, 2), (6, 2, 1)]),
        st.integers(1, 4),
        st.booleans(),
    )
    def test_it_makes_a_plan(self, lengths, ranks, asked, fill):
        dp_size, ep_size, pp_size = ranks
        topology = Topology(dp_size, ep_size=ep_size, pp_size=pp_size)
        problem = problem_of(lengths, topology=topology, objective="microbatch")
        placement = place_groups(problem, num_microbatches=asked, work=0, fill=fill)
        if placement is None:
            assert not fill
            # Bare rows leave too little room, which a row for each sample never does.
            placement = place_groups(problem, num_microbatches=len(lengths), work=0, fill=False)
        assert_is_a_plan(problem, placement, asked=asked)

    def test_long_samples_stand_side_by_side_in_one_row(self):
        # Two rows of two ranks: 80 beside 80 and 10 beside 10, not 80 beside 10 twice.
        tokens = CostModel.tokens()
        problem = problem_of([80, 10, 80, 10], topology=Topology(2), objective="microbatch", cost_model=tokens)
        placement = place_groups(problem, num_microbatches=2, work=90)
        assert placement.cost_grid.tolist() == [[80, 10], [80, 10]]
