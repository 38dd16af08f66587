"""Ranks meet once a step, at the gradient reduction: the time is the largest sum over micro-batches of a rank."""

from __future__ import annotations

from megatron_balance.planner.bounds.time import even_work, launch_cost, pigeonhole
from megatron_balance.planner.problem import Objective, Problem
from megatron_balance.topology import Topology


class Step(Objective):
    """See the module."""

    name = "step"
    trials = ("karmarkar_karp",)

    def suits(self, topology: Topology) -> bool:
        """Any."""
        return True

    def lower_bound(self, problem: Problem) -> int:
        """The even share, the largest sample, and what one rank must hold of the costliest samples."""
        forced = pigeonhole(problem.costs, num_parts=problem.topology.dp_size)
        return max(even_work(problem), forced) + launch_cost(problem)
