"""The level of plans: when it rises, and that all ranks change it in the same step."""

from __future__ import annotations

import pytest

from megatron_balance.mcore.step.plan_budget import NUM_JUDGED, PlanBudget
from megatron_balance.planner.problem import CHEAPEST_LEVEL


def measured(plans: list[float], steps: list[float], *, fixed: bool = False) -> PlanBudget:
    """A budget that has seen these seconds."""
    budget = PlanBudget(fixed=fixed)
    now = 0.0
    budget.begin_step(0, seconds=now)
    for number, seconds in enumerate(steps, start=1):
        now += seconds
        budget.begin_step(number, seconds=now)
    for seconds in plans:
        budget.add_plan(seconds)
    return budget


@pytest.mark.parametrize(
    ("plans", "steps", "share"),
    [
        ([0.3] * 4, [2.0] * 4, 150),
        ([9.0, 0.3, 9.0, 9.0], [2.0, 0.1, 2.0, 0.1], 150),  # the shortest plan, the longest step
        ([0.3] * 3, [2.0] * 4, 0),  # not known yet
        ([0.3] * 4, [2.0] * 3, 0),
        ([1e-6] * 4, [2.0] * 4, 1),  # known
        ([9.0] * 4 + [0.1] * 4, [2.0] * 4, 50),  # the newest ones
    ],
)
def test_the_share_is_the_shortest_plan_over_the_longest_step(
    plans: list[float], steps: list[float], share: int
) -> None:
    assert measured(plans, steps).share == share


def test_a_fixed_level_measures_nothing() -> None:
    assert measured([9.0] * 4, [1.0] * 4, fixed=True).share == 0


def test_a_step_that_is_made_again_counts_from_its_first_beginning() -> None:
    budget = measured([0.5] * 4, [1.0] * 4)
    budget.begin_step(4, seconds=4.9)
    budget.begin_step(5, seconds=6.0)
    assert budget.share == 250


def test_steps_that_were_left_out_are_no_step() -> None:
    budget = measured([0.5] * 4, [1.0] * 4)
    budget.begin_step(9, seconds=99.0)
    assert budget.share == 500


def test_the_level_rises_by_one_up_to_the_cheapest_and_is_measured_anew() -> None:
    budget = measured([0.5] * 4, [1.0] * 4)
    assert budget.next_level(100) == 0  # a tenth is within the budget
    for level in range(1, CHEAPEST_LEVEL + 1):
        assert budget.next_level(101) == level
        budget.use(level)
        assert budget.share == 0
        for _ in range(NUM_JUDGED):
            assert budget.share == 0
            budget.add_plan(0.5)
        assert budget.share == 500
    assert budget.next_level(1000) == CHEAPEST_LEVEL


def test_all_ranks_of_all_stages_change_level_in_the_same_step(world4) -> None:
    """Ranks 0 and 1 are the first stage, 2 and 3 the second one; rank 1 alone is slow to plan."""
    outcomes = world4.run("levels_of_steps", slow_rank=1, num_steps=13)
    assert [outcome == outcomes[0] for outcome in outcomes] == [True] * 4
    levels = [level for level, _, _ in outcomes[0]]
    assert levels == sorted(levels)
    assert set(levels) == set(range(CHEAPEST_LEVEL + 1))
    for level, digest, of_levels in outcomes[0]:
        assert digest == of_levels[level]
        assert of_levels[0] != of_levels[1]


@pytest.mark.parametrize("arguments", [{"slow_rank": None}, {"slow_rank": 1, "deterministic": True}])
def test_the_level_stays_that_of_the_size(world4, arguments: dict) -> None:
    outcomes = world4.run("levels_of_steps", num_steps=8, **arguments)
    assert all(level == 0 and digest == of_levels[0] for outcome in outcomes for level, digest, of_levels in outcome)
