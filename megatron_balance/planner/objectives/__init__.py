"""Objectives by name, one a file. A new one is a file here and a line in `OBJECTIVES`.

An objective says which ranks wait for one another, how their micro-batches make up a step (`timing.py`: with it come
target heights and the numbers of micro-batches to try), work that no plan can do without, and how groups of
context-parallel ranks are planned (`problem.Objective`).
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
"""`auto` is the first of these that suits the topology; an objective that is not here is chosen by name only."""


def objective_names() -> tuple[str, ...]:
    """The values of `--balance-objective`."""
    return ("auto", *OBJECTIVES)


def resolve_objective(objective: str, *, topology: Topology) -> str:
    """Chooses the objective that fits the topology where it is `auto`.

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
