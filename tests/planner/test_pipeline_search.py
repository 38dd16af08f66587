"""Under `pipeline`, `auto` is never above an algorithm by name, and takes as many micro-batches as pay."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.cost.model import CostModel
from megatron_balance.lengths.read import synthetic_lengths
from megatron_balance.planner.build import build_data_schedule
from megatron_balance.planner.objectives import OBJECTIVES
from megatron_balance.planner.packing.rank_levels import target_heights
from megatron_balance.planner.problem import build_problem
from megatron_balance.topology import Limits, Topology

NAMES = ("first_fit", "greedy", "karmarkar_karp")
CAP = 512
COSTS = (
    CostModel.tokens(),
    CostModel(linear=100, quadratic=1),
    CostModel(linear=3, quadratic=1, per_microbatch=9000, per_sequence=20),
)


@st.composite
def pipelines(draw):
    dp_size = draw(st.integers(1, 4))
    one = st.integers(0, draw(st.sampled_from([40, 300, 2 * CAP])))
    lengths = draw(st.lists(one, min_size=1, max_size=12 * dp_size))
    topology = Topology(
        dp_size,
        pp_size=draw(st.sampled_from([2, 4, 8])),
        vpp_size=draw(st.sampled_from([1, 2])),
        ep_size=draw(st.sampled_from([1, dp_size])),
        microbatch_multiple=draw(st.sampled_from([1, 1, 2])),
    )
    options = {
        "cost_model": draw(st.sampled_from(COSTS)),
        "topology": topology,
        "limits": draw(st.sampled_from([Limits(CAP), Limits(micro_batch_size=3)])),
        "objective": "pipeline",
    }
    if draw(st.booleans()):
        homes = st.integers(0, dp_size - 1)
        options["home_ranks"] = draw(st.lists(homes, min_size=len(lengths), max_size=len(lengths)))
        options["move_samples"] = draw(st.booleans())
    return lengths, options


@settings(max_examples=150, deadline=None)
@given(pipelines())
def test_auto_is_never_above_an_algorithm_by_name(inputs):
    lengths, options = inputs
    auto = build_data_schedule(lengths, **options).check()
    for name in NAMES:
        assert auto.predicted_cost <= build_data_schedule(lengths, algorithm=name, **options).predicted_cost


@pytest.mark.parametrize("name", ["servegen_mlarge", "gsm8k_sft", "code_files"])
def test_it_is_well_below_every_algorithm_by_name(name):
    lengths = np.minimum(synthetic_lengths(name, num_samples=256, seed=3), 8192)
    options = {
        "cost_model": CostModel(linear=10_000, quadratic=1, per_microbatch=1_280_000),
        "topology": Topology(4, pp_size=4),
        "limits": Limits(8192),
        "objective": "pipeline",
    }
    auto = build_data_schedule(lengths, **options)
    named = [build_data_schedule(lengths, algorithm=one, **options).predicted_cost for one in NAMES]
    assert auto.predicted_cost < 0.97 * min(named)


@pytest.mark.parametrize("per_microbatch", [100, 2_000, 20_000, 500_000])
def test_equal_samples_take_the_micro_batches_that_pay(per_microbatch):
    # Even micro-batches: (W/M + c) * (M + p - 1) / p, over all M that deal the samples out evenly.
    num_samples, pp_size, cost = 96, 4, 1000
    schedule = build_data_schedule(
        [cost] * num_samples,
        cost_model=CostModel(linear=1, per_microbatch=per_microbatch),
        topology=Topology(1, pp_size=pp_size),
        limits=Limits(24 * cost),
        objective="pipeline",
    )
    even = [
        math.ceil((num_samples // count * cost + per_microbatch) * (count + pp_size - 1) / pp_size)
        for count in (4, 6, 8, 12, 16, 24, 32, 48, 96)
    ]
    assert schedule.predicted_cost <= 1.02 * min(even)


def test_steep_targets_fall_evenly_and_hold_what_there_is():
    problem = build_problem(
        np.full(400, 50, dtype=np.int64),
        cost_model=CostModel.tokens(),
        topology=Topology(2, pp_size=4),
        limits=Limits(CAP),
        objective=OBJECTIVES["pipeline"],
    )
    heights = target_heights(problem, num_microbatches=20, steepness=5)
    steps = -np.diff(heights)
    assert steps.min() > 0
    assert steps.max() - steps.min() <= 1
    # Each is in the middle of its own twentieth of the slope.
    assert heights[0] / heights[-1] == pytest.approx((1 + 5 * 39 / 40) / (1 + 5 / 40), rel=0.01)
    assert 400 * 50 <= 2 * sum(heights) < 400 * 50 + 2 * 20
