"""Ranks meet in every micro-batch (experts spread over ranks, FSDP, ZeRO-3).

The time of a group is the sum over slots of the costliest rank in each; a step takes the time of the slowest group.
With both pipeline stages and expert-parallel groups over several ranks, a stage waits for its group in each slot, so
the time is the largest makespan of a group's costliest micro-batches.
"""

from __future__ import annotations

from megatron_balance.planner.bounds.time import meeting_work
from megatron_balance.planner.dynamic_cp.groups import Groups
from megatron_balance.planner.dynamic_cp.rows import place_in_rows
from megatron_balance.planner.dynamic_cp.samples import SizedSamples
from megatron_balance.planner.problem import Objective, Problem
from megatron_balance.topology import Topology


class Microbatch(Objective):
    """Minimizes the summed time of slots in which ranks wait for one another."""

    name = "microbatch"

    def suits(self, topology: Topology) -> bool:
        """True with experts spread over data-parallel ranks, or weights gathered in every micro-batch."""
        return topology.ep_span > 1 or topology.fully_sharded

    def waits_in_slots(self) -> bool:
        """Always."""
        return True

    def sync_group_size(self, topology: Topology, *, shares_work: bool = True) -> int:
        """The expert-parallel group if only its ranks meet, else all ranks."""
        span = topology.ep_span
        return topology.dp_size if topology.fully_sharded or span == 1 else span

    def is_makespan(self, topology: Topology) -> bool:
        """True with pipeline stages and expert-parallel groups over several ranks."""
        return topology.ep_span > 1 and topology.pp_size > 1

    def least_work(self, problem: Problem) -> int:
        """The forced heights of the highest slots, plus the remaining work spread evenly."""
        return meeting_work(problem)

    def place_groups(self, samples: SizedSamples, *, topology: Topology, floor: int) -> Groups:
        """Rows of all leaves, since micro-batches that span several expert-parallel groups make these groups meet."""
        pp_size = topology.pp_size if self.is_makespan(topology) else 1
        return place_in_rows(
            samples,
            floor=floor,
            multiple=topology.microbatch_multiple,
            pp_size=pp_size,
            vpp_size=topology.vpp_size,
        )
