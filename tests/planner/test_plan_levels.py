"""Cheaper levels of a plan: the invariants of every plan, and what a level leaves out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance import BalanceError, CostModel, Limits, Topology, build_data_schedule
from megatron_balance.lengths.read import synthetic_lengths
from megatron_balance.planner.problem import CHEAPEST_LEVEL

LEVELS = range(CHEAPEST_LEVEL + 1)
COSTS = CostModel(linear=10, quadratic=1, expert_linear=5, per_microbatch=1000)


@settings(deadline=None, max_examples=100)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=40),
    topology=st.sampled_from(
        (Topology(4), Topology(4, ep_size=2), Topology(4, ep_size=2, pp_size=4), Topology(2, cp_size=2, pp_size=2))
    ),
    keep_groups=st.sampled_from(("rank", "step")),
    seed=st.integers(0, 9),
)
def test_every_level_keeps_the_invariants(lengths: list[int], topology: Topology, keep_groups: str, seed: int) -> None:
    generator = np.random.default_rng(seed)
    options: dict[str, Any] = {
        "home_ranks": generator.integers(topology.dp_size, size=len(lengths)),
        "groups": generator.integers(5, size=len(lengths)),
    }
    for level in LEVELS:
        schedule = build_data_schedule(
            lengths,
            cost_model=COSTS,
            topology=topology,
            limits=Limits(40),
            keep_groups=keep_groups,
            level=level,
            **options,
        )
        schedule.check()


def test_a_cheaper_level_brings_no_samples_home_and_costs_as_much() -> None:
    topology = Topology(64)
    lengths = np.minimum(synthetic_lengths("servegen_mlarge", num_samples=64 * 32, seed=0), 4096)
    homes = np.repeat(np.arange(64), 32)
    plans = [
        build_data_schedule(
            lengths, cost_model=COSTS, topology=topology, limits=Limits(4096), home_ranks=homes, level=level
        )
        for level in LEVELS
    ]
    moved = [int(lengths[plan.destinations() != homes].sum()) for plan in plans]
    assert moved[0] < moved[1]
    assert moved[1] == plans[1].moved_tokens_before_relabel
    assert plans[1].predicted_cost <= 1.001 * plans[0].predicted_cost


@pytest.mark.parametrize("level", [-1, CHEAPEST_LEVEL + 1])
def test_other_levels_are_refused(level: int) -> None:
    with pytest.raises(BalanceError, match=rf"level is {level}: it must be an integer from 0 to 2\."):
        build_data_schedule([1], cost_model=COSTS, topology=Topology(1), limits=Limits(4), level=level)
