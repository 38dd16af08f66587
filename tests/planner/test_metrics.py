"""Figures of plans that can be worked out by hand."""

import numpy as np
import pytest

from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.planner.build import build_data_schedule
from megatron_balance.planner.floor_advice import floor_advice
from megatron_balance.planner.metrics import assignment_metrics, schedule_metrics
from megatron_balance.topology import Limits, Topology

TOKENS = CostModel.tokens()


def judge(ranks, lengths, **options):
    options = {"cost_model": TOKENS, "topology": Topology(2), "limits": Limits(20), **options}
    return assignment_metrics(ranks, lengths=lengths, **options)


def test_figures_by_hand():
    # Slots cost 10+6 and 4 on rank 0, 8 and 2 on rank 1.
    metrics = judge([[[0, 1], [2]], [[3], [4]]], [10, 6, 4, 8, 2], home_ranks=[0, 1, 0, 1, 0])
    assert metrics.objective == "step"
    assert metrics.predicted_cost == 20
    assert metrics.lower_bound == 15
    assert metrics.over_bound == pytest.approx(20 / 15)
    assert metrics.step_imbalance == pytest.approx(20 / 15)
    assert metrics.microbatch_imbalance == pytest.approx((16 + 4) / 15)
    assert metrics.peak_tokens == 16
    assert metrics.cap_headroom == pytest.approx(0.2)
    assert metrics.num_over_cap == 0
    assert metrics.num_microbatches == 2
    assert metrics.num_dummies == 0
    assert metrics.moved_tokens == 8
    assert metrics.padding_fraction == 0
    assert metrics.single_sample_floor == 1.0


def test_an_assignment_may_be_ragged_and_over_the_cap():
    metrics = judge([[[0, 1], [2]], [[3]]], [15, 6, 25, 8])
    assert metrics.num_over_cap == 1
    assert metrics.num_dummies == 1
    assert metrics.cap_headroom == pytest.approx(1 - 25 / 20)
    assert metrics.moved_tokens is None


def test_padding_is_counted_on_padded_tokens():
    # cp_size 2 pads to multiples of 4.
    metrics = judge([[[0]], [[1]]], [5, 8], topology=Topology(2, cp_size=2))
    assert metrics.padding_fraction == pytest.approx(3 / 16)
    assert metrics.cap_headroom == pytest.approx(1 - 8 / 40)


def test_groups_that_meet_are_judged_by_themselves():
    # Two expert-parallel groups of two ranks; in each both ranks are alike.
    ranks = [[[0], [1]], [[2], [3]], [[4], [5]], [[6], [7]]]
    metrics = judge(ranks, [9, 1, 9, 1, 5, 5, 5, 5], topology=Topology(4, ep_size=2))
    assert metrics.microbatch_imbalance == 1.0


def test_micro_batches_are_counted_where_there_is_no_token_cap():
    metrics = judge([[[0, 1]], [[2]]], [5, 6, 7], limits=Limits(micro_batch_size=1))
    assert metrics.num_over_cap == 1
    assert metrics.cap_headroom is None


def test_a_token_plan_is_judged_by_flops():
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(7.5, 1.2, 128)).astype(np.int64), 64, 32768)
    flops = CostModel(linear=2000, quadratic=1)
    options = {"topology": Topology(8), "limits": Limits(32768)}
    by_tokens = build_data_schedule(lengths, cost_model=TOKENS, **options)
    by_flops = build_data_schedule(lengths, cost_model=flops, **options)
    judged = schedule_metrics(by_tokens, cost_model=flops)
    assert judged.step_imbalance > schedule_metrics(by_flops).step_imbalance
    assert judged.lower_bound == schedule_metrics(by_flops).lower_bound
    stock = [[[sample] for sample in range(rank, 128, 8)] for rank in range(8)]
    assert judge(stock, lengths, cost_model=flops, **options).over_bound > judged.over_bound


def test_figures_of_a_schedule_are_its_own():
    schedule = build_data_schedule(
        [4096] * 64, cost_model=CostModel(quadratic=10**13), topology=Topology(4), limits=Limits(8192)
    )
    metrics = schedule_metrics(schedule)
    assert metrics.predicted_cost == schedule.predicted_cost << schedule.cost_shift
    assert metrics.over_bound == schedule.predicted_cost / schedule.lower_bound
    assert schedule_metrics(schedule, objective="microbatch").objective == "microbatch"


def test_an_empty_batch_is_perfect():
    metrics = judge([[], []], [])
    assert metrics.step_imbalance == metrics.microbatch_imbalance == metrics.over_bound == 1.0
    assert metrics.num_dummies == 2


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([[[0, 1]]], "has 1 ranks: it must have dp_size 2"),
        ([[[0]], [[0, 1]]], "gives sample 0 to rank 1"),
        ([[[0]], [[2]]], "gives sample 2 to rank 1"),
        ([[[0]], [[]]], "leaves out sample 1"),
    ],
)
def test_an_assignment_must_be_whole(ranks, message):
    with pytest.raises(BalanceError, match=message):
        judge(ranks, [5, 5])


class TestFloorAdvice:
    def advice(self, lengths, *, cost_model=TOKENS, **topology):
        return floor_advice(np.array(lengths), cost_model=cost_model, topology=Topology(**topology))

    def test_the_floor_is_gone_at_the_cp_size_it_names(self):
        rng = np.random.default_rng(0)
        lengths = np.append(rng.integers(10, 2000, 60), 60000)
        flops = CostModel(linear=5000, quadratic=1)
        advice = self.advice(lengths, cost_model=flops, dp_size=16)
        assert advice.floor > 2
        assert advice.cp_size is not None

        def floor(cp_size):
            return self.advice(lengths, cost_model=flops, dp_size=16 // cp_size, cp_size=cp_size).floor

        assert floor(advice.cp_size) <= 1.01 < floor(advice.cp_size // 2)
        assert f"raise --context-parallel-size to {advice.cp_size} or shorten samples above" in advice.message
        assert advice.message.startswith(f"floor {advice.floor:.2f}x at DP16")

    def test_the_floor_is_gone_at_the_length_it_names(self):
        lengths = np.append(np.full(40, 100), [5000, 900])
        advice = self.advice(lengths, dp_size=4)
        assert advice.fitting_tokens is not None
        assert advice.num_longer == int((lengths > advice.fitting_tokens).sum())
        assert self.advice(np.minimum(lengths, advice.fitting_tokens), dp_size=4).floor <= 1.01
        assert self.advice(np.minimum(lengths, advice.fitting_tokens + 1), dp_size=4).floor > 1.01

    def test_nothing_is_advised_where_nothing_is_wrong(self):
        for lengths in ([5] * 8, [], [0, 0]):
            advice = self.advice(lengths, dp_size=4, cp_size=2)
            assert (advice.cp_size, advice.num_longer) == (2, 0)
            assert advice.message == "floor 1.00x at DP4: no single sample holds up the step"

    def test_few_samples_cannot_be_shortened_into_balance(self):
        advice = self.advice([10, 10], dp_size=4)
        assert (advice.cp_size, advice.fitting_tokens) == (2, None)
        assert advice.message == "floor 2.00x at DP4: raise --context-parallel-size to 2"
        assert self.advice([10], dp_size=3).message.endswith("train on more samples a step, or on fewer ranks")
