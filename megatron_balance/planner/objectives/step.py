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
    """See the module."""

    name = "step"
    trials = ("karmarkar_karp",)

    def suits(self, topology: Topology) -> bool:
        """Any."""
        return True

    def least_work(self, problem: Problem) -> int:
        """The even share, the largest sample, and what one rank must hold of the costliest samples."""
        return max(even_work(problem), pigeonhole(problem.costs, num_parts=problem.topology.dp_size))

    def place_groups(self, samples: SizedSamples, *, topology: Topology, floor: int) -> Groups:
        """Nodes of the tree: from the root down all leaves of a group come to it at the same time."""
        nodes = place_on_tree(samples, floor=floor)
        return pack_nodes(samples, nodes, even=self.has_even_slots(topology), multiple=topology.microbatch_multiple)
