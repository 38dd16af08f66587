"""Samples of several segments: tokens and costs are sums, and ids count samples."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.planner.build import build_data_schedule
from megatron_balance.planner.metrics import assignment_metrics, schedule_metrics
from megatron_balance.topology import Limits, Topology

MODEL = CostModel(linear=10, quadratic=1, per_sequence=3, expert_linear=5)


def plan(lengths, **options):
    options = {"cost_model": MODEL, "topology": Topology(2), "limits": Limits(100), **options}
    return build_data_schedule(lengths, **options).check()


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 40), max_size=4), max_size=20),
    st.sampled_from([Topology(2), Topology(3, cp_size=2), Topology(4, ep_size=2)]),
    st.sampled_from(["step", "microbatch"]),
)
def test_tokens_and_costs_are_sums_over_segments(samples, topology, objective):
    flat = [tokens for segments in samples for tokens in segments]
    schedule = plan(flat, num_segments=[len(one) for one in samples], topology=topology, objective=objective)
    assert schedule.lengths.tolist() == [sum(one) for one in samples]
    multiple = topology.token_multiple
    padded = [sum(-(-tokens // multiple) * multiple for tokens in one) for one in samples]
    assert schedule.padded_lengths.tolist() == padded
    costs = [sum(MODEL(-(-tokens // multiple) * multiple) for tokens in one) for one in samples]
    if topology.ep_span == 1:
        costs = [cost + 5 * tokens for cost, tokens in zip(costs, padded, strict=True)]
    assert schedule.problem().costs.tolist() == costs
    held = sorted(sample for rank in schedule.ranks for ids in rank for sample in ids)
    assert held == list(range(len(samples)))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 150), max_size=30))
def test_one_segment_each_is_the_plain_plan(lengths):
    one = plan(lengths, num_segments=[1] * len(lengths))
    assert one.digest() == plan(lengths).digest()
    assert one.predicted_cost == plan(lengths).predicted_cost


def test_packed_documents_cost_less_than_one_long_one():
    model = CostModel(quadratic=1)
    packed = plan([10] * 10, num_segments=[9, 1], cost_model=model)
    assert packed.predicted_cost == 900
    assert plan([90, 10], cost_model=model).predicted_cost == 8100


def test_a_sample_without_segments_is_placed():
    schedule = plan([5, 6], num_segments=[0, 2, 0, 0])
    assert schedule.lengths.tolist() == [0, 11, 0, 0]
    assert plan([], num_segments=[0, 0]).ranks == (((0,),), ((1,),))


def test_over_long_is_a_matter_of_the_sum():
    schedule = plan([60, 60, 30, 30], num_segments=[2, 1, 1])
    assert schedule.oversized == (0,)


def test_metrics_of_segments():
    lengths, counts = [5, 7, 8, 3], [2, 1, 1]
    topology = Topology(2, cp_size=2)
    schedule = plan(lengths, num_segments=counts, topology=topology, home_ranks=[0, 0, 1])
    metrics = schedule_metrics(schedule)
    assert metrics.padding_fraction == pytest.approx((3 + 1 + 0 + 1) / 28)
    assert metrics.predicted_cost == schedule.predicted_cost << schedule.cost_shift
    judged = assignment_metrics(
        schedule.ranks,
        lengths=lengths,
        num_segments=counts,
        cost_model=MODEL,
        topology=topology,
        limits=Limits(100),
        home_ranks=np.array([0, 0, 1]),
    )
    assert (judged.predicted_cost, judged.moved_tokens) == (metrics.predicted_cost, metrics.moved_tokens)


@pytest.mark.parametrize(
    ("counts", "message"),
    [([1, 1], "num_segments sums to 2"), ([3, -1], r"num_segments\[1\] is -1"), ([1.0, 2.0], r"num_segments\[0\] is")],
)
def test_wrong_segments_are_named(counts, message):
    with pytest.raises(BalanceError, match=message):
        plan([5, 6, 7], num_segments=counts)
