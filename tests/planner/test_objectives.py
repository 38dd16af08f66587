"""Objectives as objects: a fourth is one class and one line of the registry."""

import numpy as np
import pytest

from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.planner.bounds.time import meeting_work
from megatron_balance.planner.build import build_data_schedule
from megatron_balance.planner.metrics import schedule_metrics
from megatron_balance.planner.objectives import OBJECTIVES, Objective, objective_names, resolve_objective
from megatron_balance.topology import Limits, Topology

LENGTHS = (np.arange(1, 161) * 7919 % 1021) ** 2 // 700 + 5
COSTS = CostModel(linear=1000, quadratic=9, per_microbatch=20_000)


class Pairs(Objective):
    """Two neighbouring ranks wait for each other in every micro-batch, as two towers of one model would."""

    name = "pairs"

    def suits(self, topology):
        return topology.dp_size % 2 == 0

    def waits_in_slots(self):
        return True

    def sync_group_size(self, topology, *, shares_work=True):
        return 2

    def least_work(self, problem):
        return meeting_work(problem)


def plan(objective, topology=None):
    options = {"cost_model": COSTS, "topology": topology or Topology(8), "limits": Limits(2048)}
    return build_data_schedule(LENGTHS, objective=objective, **options).check()


def test_a_fourth_objective_plans_and_is_judged(monkeypatch):
    with pytest.raises(BalanceError, match="objective is 'pairs'"):
        plan("pairs")
    monkeypatch.setitem(OBJECTIVES, "pairs", Pairs())
    assert objective_names()[-1] == "pairs"
    planned = plan("pairs")
    grid = planned.cost_grid
    assert planned.predicted_cost == max(int(np.maximum(grid[i], grid[i + 1]).sum()) for i in range(0, 8, 2))
    assert planned.lower_bound <= planned.predicted_cost <= 1.01 * planned.lower_bound
    for other in ("step", "microbatch"):
        metrics = schedule_metrics(plan(other), objective="pairs")
        assert metrics.predicted_cost >= planned.predicted_cost
    assert schedule_metrics(planned).objective == "pairs"
    with pytest.raises(BalanceError, match=r"objective is 'pairs': with Topology\.dynamic_cp"):
        plan("pairs", topology=Topology(8, dynamic_cp=True))
    # It is chosen by name only until it has a place among those that `auto` looks at.
    assert resolve_objective("auto", topology=Topology(8)) == "step"


def test_a_fourth_objective_may_plan_groups_of_context_parallel_ranks(monkeypatch):
    class PairsInRows(Pairs):
        place_groups = OBJECTIVES["microbatch"].place_groups

    monkeypatch.setitem(OBJECTIVES, "pairs", PairsInRows())
    topology = Topology(4, cp_size=2, dynamic_cp=True)
    planned = plan("pairs", topology=topology)
    assert planned.predicted_cost == plan("microbatch", topology=topology).predicted_cost
    assert planned.predicted_cost == int(planned.cost_grid.max(axis=0).sum())


@pytest.mark.parametrize(
    ("topology", "name", "size"),
    [
        (Topology(8), "step", 1),
        (Topology(8, pp_size=2), "pipeline", 1),
        (Topology(8, ep_size=4), "microbatch", 4),
        (Topology(8, ep_size=4, pp_size=2), "microbatch", 4),
        (Topology(8, fully_sharded=True, pp_size=2), "microbatch", 8),
        (Topology(8, tp_size=4, ep_size=4), "step", 1),
    ],
)
def test_auto_asks_which_ranks_meet(topology, name, size):
    assert resolve_objective("auto", topology=topology) == name
    objective = OBJECTIVES[name]
    assert objective.sync_group_size(topology, shares_work=False) == size
    assert objective.waits_in_slots() == (size > 1)
    assert objective.is_makespan(topology) == (topology.pp_size > 1 and not topology.fully_sharded)


def test_expert_ranks_meet_in_a_pipeline_where_they_share_work():
    topology = Topology(8, ep_size=4, pp_size=2)
    assert OBJECTIVES["pipeline"].sync_group_size(topology, shares_work=True) == 4
    assert OBJECTIVES["pipeline"].sync_group_size(topology, shares_work=False) == 1


@pytest.mark.parametrize("name", OBJECTIVES)
def test_time_is_the_slowest_groups(name):
    of_groups = np.array([[5, 1, 1], [4, 4, 4]])
    assert OBJECTIVES[name].timing(Topology(2)).time(of_groups) == 12
