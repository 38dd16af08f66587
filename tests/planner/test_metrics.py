"""Figures of plans that can be worked out by hand."""

import numpy as np
import pytest
from plan_judge import figures_of_ranks

from megatron_balance import CostModel, Limits, Topology, build_data_schedule
from megatron_balance.planner import slowest_over_mean, waiting

TOKENS = CostModel.tokens()


def judge(ranks, lengths, **options):
    options = {"cost_model": TOKENS, "topology": Topology(2), "limits": Limits(20), **options}
    return figures_of_ranks(ranks, lengths, **options)


def test_figures_by_hand():
    # Slots cost 10+6 and 4 on rank 0, 8 and 2 on rank 1.
    metrics = judge([[[0, 1], [2]], [[3], [4]]], [10, 6, 4, 8, 2])
    assert metrics.objective == "step"
    assert metrics.predicted_cost == 20
    assert metrics.lower_bound == 15
    assert metrics.over_bound == pytest.approx(20 / 15)
    assert metrics.step_imbalance == pytest.approx(20 / 15)
    assert metrics.peak_tokens == 16
    assert metrics.cap_headroom == pytest.approx(0.2)
    assert metrics.num_over_cap == 0
    assert metrics.num_microbatches == 2
    assert metrics.padding_fraction == 0
    assert metrics.unavoidable_waiting == 0


@pytest.mark.parametrize(
    ("ranks", "share"),
    [
        # Ranks have 12, 4, 4 and 4 to do: three wait while the first computes.
        ({}, 1 / 2),
        ({"fully_sharded": True}, 1 / 2),
        # A stage has a half of each micro-batch to do, and the long one passes both in turn.
        ({"pp_size": 2}, 3 / 4),
    ],
)
def test_waiting_beside_a_giant_that_no_plan_removes(ranks, share):
    lengths, topology = [1200, 400, 200, 200, 400], Topology(4, **ranks)
    metrics = judge([[[0]], [[1]], [[2, 3]], [[4]]], lengths, topology=topology, limits=Limits(1200))
    assert (metrics.over_bound, metrics.unavoidable_waiting) == (1, pytest.approx(share))
    sizes = build_data_schedule(
        lengths, cost_model=TOKENS, topology=Topology(4, dynamic_cp=True, **ranks), limits=Limits(1200)
    ).metrics()
    assert sizes.unavoidable_waiting < metrics.unavoidable_waiting / 2, "larger sizes remove it"


SIZED = CostModel(linear=1000, quadratic=1, cp_exchange=800)


def test_figures_of_sizes_of_their_own_by_hand():
    schedule = build_data_schedule(
        [2000, 500, 500, 500, 500],
        cost_model=SIZED,
        topology=Topology(2, cp_size=2, dynamic_cp=True),
        limits=Limits(512),
    )
    metrics = schedule.metrics()
    # Four ranks share the long sample, and what each receives takes longer than its attention; then a short one each.
    shared, alone = (2000 * 1000 + 3 * 800 * 2000) // 4, 500 * 1000 + 500**2
    assert metrics.predicted_cost == metrics.lower_bound == shared + alone
    assert (metrics.over_bound, metrics.step_imbalance) == (1, 1)
    assert metrics.mean_cp_size == (2000 * 4 + 2000) / 4000
    assert (metrics.peak_tokens, metrics.cap_headroom) == (500, 1 - 500 / 512)
    assert (metrics.num_microbatches, metrics.num_over_cap) == (2, 0)
    assert metrics.padding_fraction == 0
    free = schedule.metrics(cost_model=CostModel(linear=1000, quadratic=1))
    assert free.predicted_cost == (2000 * 1000 + 2000**2) // 4 + alone


@pytest.mark.parametrize(
    ("topology", "size"),
    [
        (Topology(8), 8),
        (Topology(8, ep_size=4), 4),
        (Topology(8, ep_size=4, fully_sharded=True), 8),
        (Topology(8, tp_size=2, ep_size=4), 2),
        (Topology(4, cp_size=2, ep_size=2, dynamic_cp=True), 8),
    ],
)
def test_the_slowest_of_ranks_that_meet_is_theirs(topology, size):
    assert waiting("microbatch", topology=topology).sync_size == size
    assert waiting("step", topology=topology).sync_size == 1
    grid = np.zeros((8, 2))
    grid[:, 0] = range(8)
    grid[size - 1, 1] = 40
    groups = [grid[first : first + size].max(axis=0).sum() for first in range(0, 8, size)]
    assert slowest_over_mean(grid, objective="microbatch", topology=topology) == max(groups) / (grid.sum() / 8)
    assert slowest_over_mean(grid, objective="step", topology=topology) == grid.sum(axis=1).max() / (grid.sum() / 8)
