"""Seconds and tokens per second: from FLOPs, from a calibration, from what a run took; and the pipeline's imbalance."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_balance.cost.calibration import Calibration
from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.model.shape import ModelShape
from megatron_balance.planner.metrics import assignment_metrics
from megatron_balance.planner.throughput import (
    num_gpus,
    rate_of_calibration,
    rate_of_flops,
    rate_of_run,
    rate_of_tokens,
    step_seconds,
)
from megatron_balance.topology import Limits, Topology


def test_flops_at_a_stated_speed_are_shared_by_the_gpus_of_a_rank() -> None:
    topology = Topology(1, tp_size=2, cp_size=4)
    cost = CostModel.from_shape(ModelShape.preset("Qwen3-8B"))(4096)
    rate = rate_of_flops(topology, peak_tflops=1000, efficiency=0.5)
    assert rate.is_absolute
    # 8 GPUs at half of 1e15 FLOPs a second.
    assert step_seconds(cost, objective="step", topology=topology, rate=rate) == pytest.approx(cost / (8 * 0.5e15))


def test_without_a_speed_there_are_ratios_only() -> None:
    assert not rate_of_flops(Topology(2), peak_tflops=None, efficiency=0.4).is_absolute
    assert not rate_of_tokens(Topology(2)).is_absolute


def test_stages_share_work_but_a_makespan_is_of_them_all() -> None:
    rate = rate_of_flops(Topology(2, pp_size=4), peak_tflops=1, efficiency=1)
    topology = Topology(2, pp_size=4)
    assert step_seconds(4 * 10**12, objective="step", topology=topology, rate=rate) == pytest.approx(1.0)
    assert step_seconds(4 * 10**12, objective="pipeline", topology=topology, rate=rate) == pytest.approx(4.0)
    experts = Topology(2, pp_size=4, ep_size=2)
    assert step_seconds(4 * 10**12, objective="microbatch", topology=experts, rate=rate) == pytest.approx(4.0)
    sharded = Topology(2, pp_size=4, fully_sharded=True)
    assert step_seconds(4 * 10**12, objective="microbatch", topology=sharded, rate=rate) == pytest.approx(1.0)


def test_a_calibration_says_its_own_seconds() -> None:
    calibration = Calibration(linear=1e-6, per_microbatch=1e-3)
    topology = Topology(1)
    figures = assignment_metrics(
        [[[0], [1]]],
        lengths=[1000, 2000],
        cost_model=calibration.cost_model(),
        topology=topology,
        limits=Limits(4096),
    )
    seconds = step_seconds(figures.predicted_cost, objective="step", topology=topology, rate=rate_of_calibration())
    assert seconds == pytest.approx(3e-3 + 2e-3)


def test_what_a_run_took_holds_for_other_ranks() -> None:
    ran_on = Topology(4, pp_size=2, cp_size=2)
    # A stage held half of the layers, and took 1e-15 s a unit of the whole model's cost.
    same = rate_of_run(1e-15, ran_on=ran_on, topology=ran_on)
    assert same.seconds_per_cost == pytest.approx(2e-15)
    assert rate_of_run(1e-15, ran_on=ran_on, topology=Topology(4, pp_size=2)).seconds_per_cost == pytest.approx(4e-15)


def test_gpus_are_all_but_those_of_experts() -> None:
    assert num_gpus(Topology(2, tp_size=3, cp_size=4, pp_size=5, ep_size=2)) == 120


@pytest.mark.parametrize(("peak", "efficiency"), [(0.0, 0.4), (-1.0, 0.4), (float("nan"), 0.4), (1.0, 0.0), (1.0, 1.1)])
def test_a_speed_that_is_none_is_named(peak: float, efficiency: float) -> None:
    with pytest.raises(BalanceError, match=r"--peak-tflops|--efficiency"):
        rate_of_flops(Topology(1), peak_tflops=peak, efficiency=efficiency)


def test_pipeline_imbalance_leaves_out_the_bubble_that_even_micro_batches_have() -> None:
    topology = Topology(2, pp_size=4)
    common = {"cost_model": CostModel.tokens(), "topology": topology, "limits": Limits(100), "objective": "pipeline"}
    even = assignment_metrics([[[0], [1]], [[2], [3]]], lengths=[12, 12, 12, 12], **common)
    assert even.pipeline_imbalance == 1.0
    assert even.over_bound > 1.1  # the bubble
    # One rank with twice the work of the other, even within each: 4/3 of the mean.
    uneven = assignment_metrics([[[0], [1]], [[2], [3]]], lengths=[16, 16, 8, 8], **common)
    assert uneven.pipeline_imbalance == pytest.approx(4 / 3)
    # The same work of each rank in unlike micro-batches: only the pipeline sees it.
    order = assignment_metrics([[[0], [1]], [[2], [3]]], lengths=[22, 2, 22, 2], **common)
    assert order.step_imbalance == 1.0
    assert order.pipeline_imbalance > 1.2


def test_pipeline_imbalance_without_a_pipeline_is_that_of_steps() -> None:
    figures = assignment_metrics(
        [[[0]], [[1]]],
        lengths=np.array([30, 10]),
        cost_model=CostModel.tokens(),
        topology=Topology(2),
        limits=Limits(64),
    )
    assert figures.pipeline_imbalance == figures.step_imbalance == 1.5
