"""Registry of objectives, one per file. To add one, add a file here and its entry in `OBJECTIVES`.

An objective (`problem.Objective`) defines which ranks wait for one another, the time of a step from its micro-batches
(`timing.py`, with target heights and the numbers of micro-batches to try), a lower bound on work, and the planner for
dynamic context-parallel sizes.
"""

from __future__ import annotations

from megatron_balance.errors import BalanceError
from megatron_balance.planner.objectives.microbatch import Microbatch
from megatron_balance.planner.objectives.pipeline import Pipeline
from megatron_balance.planner.objectives.step import Step
from megatron_balance.planner.problem import Objective
from megatron_balance.topology import Topology

OBJECTIVES: dict[str, Objective] = {objective.name: objective for objective in (Step(), Microbatch(), Pipeline())}
"""Objectives by the name that `--balance-objective` and `build_data_schedule` take."""

_AUTO_ORDER = ("microbatch", "pipeline", "step")
"""`auto` chooses the first of these that suits the topology; other objectives are chosen by name only."""


def objective_names() -> tuple[str, ...]:
    """The values of `--balance-objective`."""
    return ("auto", *OBJECTIVES)


def resolve_objective(objective: str, *, topology: Topology) -> str:
    """The name of the objective; `auto` is resolved by the topology.

    Raises:
        BalanceError: there is no such objective.
    """
    if objective not in objective_names():
        raise BalanceError(f"objective is {objective!r}: it must be one of {', '.join(objective_names())}.")
    if objective != "auto":
        return objective
    return next(name for name in _AUTO_ORDER if OBJECTIVES[name].suits(topology))


def is_makespan(objective: str, *, topology: Topology) -> bool:
    """`Objective.is_makespan` of an objective by name."""
    return OBJECTIVES[objective].is_makespan(topology)


__all__ = ["OBJECTIVES", "Objective", "is_makespan", "objective_names", "resolve_objective"]
