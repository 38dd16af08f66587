"""Large batches planned as copies of a part: the invariants of every plan, and near the plan of the whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_balance import CostModel, DataSchedule, Limits, Topology, build_data_schedule
from megatron_balance.lengths.read import synthetic_lengths
from megatron_balance.planner.objectives import OBJECTIVES, resolve_objective
from megatron_balance.planner.packing import copies, place
from megatron_balance.planner.problem import CHEAPEST_LEVEL, build_problem

TOPOLOGIES = (
    Topology(8),
    Topology(4, microbatch_multiple=3),
    Topology(8, ep_size=2),
    Topology(16, ep_size=4, pp_size=2, vpp_size=2),
    Topology(4, pp_size=4, cp_size=2),
    Topology(4, fully_sharded=True),
)
CAP = 64


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "MIN_SAMPLES", 2)
    monkeypatch.setattr(copies, "MIN_GROUPS", 1)
    monkeypatch.setattr(place, "MAX_NAMED_SAMPLES", 0)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(0, 2 * CAP), max_size=90),
    topology=st.sampled_from(TOPOLOGIES),
    limits=st.sampled_from((Limits(CAP), Limits(micro_batch_size=3))),
    costs=st.sampled_from(
        (CostModel.tokens(), CostModel(linear=3, quadratic=1, expert_linear=7, per_microbatch=50, per_sequence=9))
    ),
    level=st.integers(0, CHEAPEST_LEVEL),
)
@pytest.mark.usefixtures("small_parts")
def test_copies_keep_every_invariant(
    lengths: list[int], topology: Topology, limits: Limits, costs: CostModel, level: int
) -> None:
    schedule = build_data_schedule(lengths, cost_model=costs, topology=topology, limits=limits, level=level)
    schedule.check()
    again = build_data_schedule(lengths[::-1], cost_model=costs, topology=topology, limits=limits, level=level)
    assert again.predicted_cost == schedule.predicted_cost


@pytest.mark.parametrize("topology", [Topology(64), Topology(512, ep_size=8), Topology(64, pp_size=8)])
def test_copies_are_near_the_plan_of_the_whole(topology: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.minimum(synthetic_lengths("servegen_mlarge", num_samples=2 * copies.MIN_SAMPLES, seed=0), 16384)
    costs = CostModel(linear=70_000, quadratic=5, expert_linear=40_000, per_microbatch=10**8)

    def plan() -> DataSchedule:
        return build_data_schedule(lengths, cost_model=costs, topology=topology, limits=Limits(16384)).check()

    in_parts = plan()
    parts: list[int] = []
    monkeypatch.setattr(place, "num_parts", lambda problem: parts.append(copies.num_parts(problem)) or 1)
    assert in_parts.predicted_cost <= 1.01 * plan().predicted_cost
    assert parts == [2]


@pytest.mark.parametrize(
    ("topology", "samples_per_rank", "level", "parts"),
    [
        (Topology(8192), 64, 0, 32),
        (Topology(8192), 64, 1, 32),
        (Topology(8192), 64, 2, 128),
        (Topology(1250), 128, 0, 5),  # any divisor
        (Topology(1009), 128, 2, 1),  # a prime
        (Topology(8192, ep_size=64), 64, 0, 4),
        (Topology(8192, ep_size=64), 64, 2, 16),
        (Topology(8192, ep_size=64, pp_size=8), 64, 0, 8),  # the search of a pipeline takes longest
        (Topology(2048, ep_size=64, pp_size=8), 64, 0, 2),
        (Topology(1024, ep_size=64, pp_size=8), 64, 0, 1),
        (Topology(64), 64, 0, 1),
    ],
)
def test_numbers_of_parts(topology: Topology, samples_per_rank: int, level: int, parts: int) -> None:
    problem = build_problem(
        np.full(samples_per_rank * topology.dp_size, 100),
        cost_model=CostModel(linear=1, expert_linear=1),
        topology=topology,
        limits=Limits(1000),
        objective=OBJECTIVES[resolve_objective("auto", topology=topology)],
        level=level,
    )
    assert copies.num_parts(problem) == parts
