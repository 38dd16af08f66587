"""Features of micro-batches: with the cost model's own coefficients they give its costs back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_balance import CostModel, DataSchedule, Limits, Topology, build_data_schedule
from megatron_balance.calibration.features import coefficients_of, cost_model_of, is_slowest, slot_features

MODEL = CostModel(linear=500, quadratic=3, per_sequence=900, per_microbatch=5000, windows=((64, 2),))


def plan(
    cost_model: CostModel, topology: Topology, *, num_segments: list[int] | None = None, cap: int = 2000
) -> DataSchedule:
    rng = np.random.default_rng(7)
    lengths = rng.integers(1, 900, 60 if num_segments is None else sum(num_segments))
    return build_data_schedule(
        lengths, cost_model=cost_model, topology=topology, limits=Limits(cap), num_segments=num_segments
    )


@pytest.mark.parametrize("num_segments", [None, [1, 2, 3, 4, 0] * 6])
@pytest.mark.parametrize(
    "topology", [Topology(4), Topology(2, cp_size=2), Topology(2, tp_size=4, sequence_parallel=True)]
)
def test_features_times_coefficients_are_the_planned_costs(topology: Topology, num_segments: list[int] | None) -> None:
    schedule = plan(MODEL, topology, num_segments=num_segments)
    for rank in range(topology.dp_size):
        features = slot_features(schedule, rank=rank, cost_model=MODEL)
        np.testing.assert_allclose(features @ coefficients_of(MODEL), schedule.cost_grid[rank], rtol=1e-12)


@pytest.mark.parametrize("num_segments", [None, [1, 2, 3, 4, 0] * 6])
@pytest.mark.parametrize("topology", [Topology(2, cp_size=2, dynamic_cp=True), Topology(3, dynamic_cp=True, tp_size=2)])
def test_leaves_with_sizes_of_their_own(topology: Topology, num_segments: list[int] | None) -> None:
    model = replace(MODEL, cp_exchange=40)
    schedule = plan(model, topology, num_segments=num_segments, cap=500)
    assert len({size for sizes in schedule.cp_sizes for size in sizes}) > 1
    for leaf, sizes in enumerate(schedule.cp_sizes):
        features = slot_features(schedule, rank=leaf, cost_model=model)
        # The grid rounds each sample's part up.
        costs = schedule.cost_grid[leaf, : len(sizes)]
        np.testing.assert_allclose(features @ coefficients_of(model), costs, rtol=1e-4)
        assert is_slowest(schedule, rank=leaf).tolist() == [True] * len(sizes)


def test_expert_work_is_shared_by_the_group() -> None:
    model = CostModel(linear=500, expert_linear=700, quadratic=3)
    schedule = plan(model, Topology(4, ep_size=2))
    for rank in range(4):
        features = slot_features(schedule, rank=rank, cost_model=model)
        # The grid rounds each sample's even share up.
        np.testing.assert_allclose(features @ coefficients_of(model), schedule.cost_grid[rank], rtol=1e-5)


def test_only_the_slowest_of_those_that_meet_sets_the_pace() -> None:
    schedule = plan(CostModel(linear=500, expert_linear=700, quadratic=3), Topology(4, ep_size=2))
    pace = np.array([is_slowest(schedule, rank=rank) for rank in range(4)])
    grid = schedule.cost_grid
    for group in (slice(0, 2), slice(2, 4)):
        assert (pace[group] == (grid[group] == grid[group].max(axis=0))).all()
    assert all(is_slowest(plan(MODEL, Topology(4)), rank=rank).all() for rank in range(4))


def test_a_cost_model_comes_back_from_its_coefficients() -> None:
    assert cost_model_of(coefficients_of(MODEL), cost_model=MODEL, units_per_second=1) == MODEL
    shared = replace(MODEL, cp_exchange=25)
    assert cost_model_of(coefficients_of(shared), cost_model=MODEL, units_per_second=1) == shared
    # What was not learned keeps its part of the linear cost.
    doubled = cost_model_of(2 * coefficients_of(shared)[:4], cost_model=shared, units_per_second=1)
    assert (doubled.linear, doubled.cp_exchange) == (1000, 50)
    experts = CostModel(linear=500, expert_linear=1500, quadratic=3)
    doubled = cost_model_of(coefficients_of(experts) * 2, cost_model=experts, units_per_second=10)
    assert doubled == CostModel(linear=10_000, expert_linear=30_000, quadratic=60)
