"""Encoder and language model evened out each, where ranks meet between the two."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.cost.model import CostModel
from megatron_balance.planner.build import build_data_schedule
from megatron_balance.planner.metrics import assignment_metrics, schedule_metrics
from megatron_balance.planner.packing import even_parts as rooms
from megatron_balance.planner.packing import place
from megatron_balance.planner.schedule import DataSchedule
from megatron_balance.topology import Limits, Topology

MODEL = CostModel(linear=1, image_linear=1)
EXPERTS = CostModel(linear=1, quadratic=1, expert_linear=3, image_linear=2, image_quadratic=1, per_microbatch=5)
SHARDED = Topology(2, fully_sharded=True)


def plan(lengths: list[int], images: list[list[int]], **options: Any) -> DataSchedule:
    options = {"cost_model": MODEL, "topology": SHARDED, "limits": Limits(100), **options}
    return build_data_schedule(lengths, image_patches=images, **options).check()


def time_by_hand(schedule: DataSchedule, costs: np.ndarray, images: np.ndarray) -> int:
    """Of ranks that all meet, from the sample ids of each micro-batch."""
    parts = images.tolist(), (costs - images).tolist()
    return sum(
        max(sum(part[sample] for sample in ids) for ids in slots)
        for slots in zip(*schedule.ranks, strict=True)
        for part in parts
    )


def test_each_part_is_even_and_not_only_their_sum() -> None:
    schedule = plan([10, 10, 20, 20], [[10], [10], [], []], limits=Limits(60))
    assert schedule.num_microbatches == 1
    assert schedule.predicted_cost == schedule.lower_bound == 40
    both_images = assignment_metrics(
        [[[0, 1]], [[2, 3]]],
        lengths=[10, 10, 20, 20],
        image_patches=[[10], [10], [], []],
        cost_model=MODEL,
        topology=SHARDED,
        limits=Limits(60),
    )
    assert both_images.step_imbalance == 1
    assert both_images.predicted_cost == 60


@pytest.mark.parametrize(
    ("topology", "objective"),
    [
        (Topology(2), "auto"),  # ranks meet once a step
        (Topology(4, ep_size=2, pp_size=2), "auto"),  # stages are apart
        (SHARDED, "step"),
    ],
)
def test_where_ranks_do_not_meet_between_the_parts_the_sum_counts(topology: Topology, objective: str) -> None:
    schedule = plan([10, 10, 20, 20] * 2, [[10], [10], [], []] * 2, topology=topology, objective=objective)
    problem = schedule.problem()
    assert problem.image_costs is None
    assert problem.predicted_cost(schedule.cost_grid) == schedule.predicted_cost


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.lists(st.integers(1, 20), max_size=2)), min_size=1, max_size=40),
    st.sampled_from([SHARDED, Topology(4, fully_sharded=True), Topology(4, ep_size=2), Topology(8, ep_size=4)]),
    st.sampled_from([MODEL, EXPERTS]),
)
def test_plans_keep_their_invariants_and_lose_nothing(
    samples: list[tuple[int, list[int]]], topology: Topology, cost_model: CostModel
) -> None:
    lengths, images = [length for length, _ in samples], [patches for _, patches in samples]
    homes = [index % topology.dp_size for index in range(len(samples))]
    schedule = plan(lengths, images, topology=topology, cost_model=cost_model, home_ranks=homes)
    assert schedule_metrics(schedule).predicted_cost == schedule.predicted_cost << schedule.cost_shift
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, "even_parts", lambda problem, found: found)
        by_sum = plan(lengths, images, topology=topology, cost_model=cost_model, home_ranks=homes)
    assert schedule.predicted_cost <= by_sum.predicted_cost
    assert schedule.num_microbatches == by_sum.num_microbatches
    if topology.fully_sharded and cost_model is MODEL:
        problem = schedule.problem()
        assert problem.image_costs is not None
        assert time_by_hand(schedule, problem.costs, problem.image_costs) == schedule.predicted_cost


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), min_size=2, max_size=7))
def test_no_assignment_beats_the_bound_and_few_beat_the_plan(samples: list[tuple[int, int]]) -> None:
    lengths, images = [length for length, _ in samples], [[patches] for _, patches in samples]
    schedule = plan(lengths, images, limits=Limits(1000))
    times = [
        max(sum(patches for (_, patches), on in zip(samples, ranks, strict=True) if on == rank) for rank in range(2))
        + max(sum(length for (length, _), on in zip(samples, ranks, strict=True) if on == rank) for rank in range(2))
        for ranks in product(range(2), repeat=len(samples))
        if len(set(ranks)) == 2
    ]
    assert schedule.lower_bound <= min(times) <= schedule.predicted_cost
    assert sum(time < schedule.predicted_cost for time in times) <= len(times) / 4


def test_large_mixtures_come_close_to_the_bound() -> None:
    """Half of the samples have an image of one of three sizes; texts differ a hundredfold."""
    generator = np.random.default_rng(3)
    lengths = (32 * 100 ** generator.random(512)).astype(int).tolist()
    images = [[int(generator.choice([256, 1024, 4096]))] if generator.random() < 0.5 else [] for _ in lengths]
    topology = Topology(16, fully_sharded=True)
    schedule = plan(lengths, images, topology=topology, limits=Limits(65536))
    cheap = plan(lengths, images, topology=topology, limits=Limits(65536), level=1)
    assert schedule.predicted_cost < 1.04 * schedule.lower_bound
    assert 2 * (schedule.predicted_cost - schedule.lower_bound) < cheap.predicted_cost - cheap.lower_bound


def test_large_slots_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, images = [11, 9, 20, 20], [[10], [10], [], []]
    evened = plan(lengths, images, limits=Limits(60))
    monkeypatch.setattr(rooms, "MAX_SAMPLES", 3)
    assert plan(lengths, images, limits=Limits(60)).predicted_cost > evened.predicted_cost
