"""Ranks meet once a step, at the gradient reduction: the time is the largest sum over micro-batches of a rank."""

from __future__ import annotations

from megatron_balance.planner.bounds.time import even_work, pigeonhole
from megatron_balance.planner.dynamic_cp.groups import Groups
from megatron_balance.planner.dynamic_cp.node_packs import pack_nodes
from megatron_balance.planner.dynamic_cp.samples import SizedSamples
from megatron_balance.planner.dynamic_cp.tree import place_on_tree
from megatron_balance.planner.problem import Objective, Problem
from megatron_balance.topology import Topology


class Step(Objective):
    """Minimizes the largest sum of a rank."""

    name = "step"
    trials = ("karmarkar_karp",)

    def suits(self, topology: Topology) -> bool:
        """Always True."""
        return True

    def least_work(self, problem: Problem) -> int:
        """The largest of the even share, the largest sample and the pigeonhole bound of the costliest samples."""
        return max(even_work(problem), pigeonhole(problem.costs, num_parts=problem.topology.dp_size))

    def place_groups(self, samples: SizedSamples, *, topology: Topology, floor: int) -> Groups:
        """Places samples on nodes of the tree, run from the root down, so that a group's leaves start it together."""
        nodes = place_on_tree(samples, floor=floor)
        return pack_nodes(samples, nodes, even=self.has_even_slots(topology), multiple=topology.microbatch_multiple)
