"""Ranks meet once, after a one-forward-one-backward pipeline: the time is the largest makespan of a rank.

Groups of expert-parallel ranks meet in every micro-batch as well where they share work; `auto` chooses `microbatch` for
these.
"""

from __future__ import annotations

from megatron_balance.planner.bounds.time import even_work, in_stages, launch_cost, meeting_work, pigeonhole
from megatron_balance.planner.problem import Objective, Problem
from megatron_balance.topology import Topology


class Pipeline(Objective):
    """See the module."""

    name = "pipeline"
    # The highest micro-batch as costly as the lowest, or six times so; slopes between hardly ever gave less.
    slopes = (0, 5)
    # A makespan follows no sum that level packing could aim at.
    trials = ("first_fit", "greedy", "karmarkar_karp")

    def suits(self, topology: Topology) -> bool:
        """Several pipeline stages."""
        return topology.pp_size > 1

    def sync_group_size(self, topology: Topology, *, shares_work: bool = True) -> int:
        """Expert-parallel ranks meet where they share work."""
        return topology.ep_span if shares_work else 1

    def is_makespan(self, topology: Topology) -> bool:
        """Always."""
        return True

    def lower_bound(self, problem: Problem) -> int:
        """The work of a stage and the ends where it idles, or one micro-batch through all stages."""
        work = meeting_work(problem) if problem.sync_group_size > 1 else even_work(problem)
        work = max(work, pigeonhole(problem.costs, num_parts=problem.topology.dp_size))
        return in_stages(problem, work + launch_cost(problem))
