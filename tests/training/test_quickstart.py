"""The plans between which `make quickstart` takes turns: its training takes minutes, and no test runs it whole."""

from __future__ import annotations

import numpy as np
import policy_turns
import pytest

from megatron_balance import CostModel, Limits, Topology

LENGTHS = np.array([100, 900, 60, 3000, 40, 700, 80, 90])
HOMES = np.arange(LENGTHS.size) % 4
COST = CostModel(linear=500, quadratic=1, cp_exchange=5)


@pytest.mark.parametrize("policy", policy_turns.POLICIES[1:])
def test_each_policy_has_a_plan_of_its_kind(policy: str) -> None:
    schedule = policy_turns.plan_of(
        policy,
        LENGTHS,
        cost_model=COST,
        topology=Topology(4, dynamic_cp=True),
        limits=Limits(4096),
        home_ranks=HOMES,
    ).check()
    moved = bool((schedule.destinations() != HOMES).any())
    assert moved is (policy != "packed")
    assert bool(schedule.cp_size_grid.max() > 1) is (policy == "dynamic_cp")


def test_every_policy_meets_every_batch() -> None:
    names = policy_turns.POLICIES
    met = [policy_turns.policy_of_step(step) for step in range(len(names) ** 2)]
    assert all(set(met[at :: len(names)]) == set(names) for at in range(len(names)))
