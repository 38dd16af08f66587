"""Ranks meet once, after a one-forward-one-backward pipeline: the time is the largest makespan of a rank.

Expert-parallel ranks that share work also meet in every micro-batch; `auto` chooses `microbatch` for them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_balance.planner.bounds.time import even_work, meeting_work, pigeonhole
from megatron_balance.planner.dynamic_cp.groups import Groups
from megatron_balance.planner.dynamic_cp.node_packs import pack_nodes
from megatron_balance.planner.dynamic_cp.rows import place_in_rows
from megatron_balance.planner.dynamic_cp.samples import SizedSamples
from megatron_balance.planner.dynamic_cp.tree import place_on_tree
from megatron_balance.planner.makespan import pipeline_makespans
from megatron_balance.planner.problem import Objective, Problem
from megatron_balance.topology import Topology


class Pipeline(Objective):
    """Minimizes the largest makespan of a rank."""

    name = "pipeline"
    # A makespan does not follow from sums, which are the targets of level packing.
    trials = ("first_fit", "greedy", "karmarkar_karp")

    def suits(self, topology: Topology) -> bool:
        """True with several pipeline stages."""
        return topology.pp_size > 1

    def sync_group_size(self, topology: Topology, *, shares_work: bool = True) -> int:
        """The expert-parallel group if its ranks share work, else 1."""
        return topology.ep_span if shares_work else 1

    def is_makespan(self, topology: Topology) -> bool:
        """Always."""
        return True

    def least_work(self, problem: Problem) -> int:
        """The even share or the work of ranks that meet, at least the pigeonhole bound of the costliest samples."""
        work = meeting_work(problem) if problem.sync_group_size > 1 else even_work(problem)
        return max(work, pigeonhole(problem.costs, num_parts=problem.topology.dp_size))

    def place_groups(self, samples: SizedSamples, *, topology: Topology, floor: int) -> Groups:
        """Plans rows and the tree and keeps the faster: groups of the tree wait for one another less often."""
        multiple = topology.microbatch_multiple
        rows = place_in_rows(
            samples, floor=floor, multiple=multiple, pp_size=topology.pp_size, vpp_size=topology.vpp_size
        )
        tree = pack_nodes(samples, place_on_tree(samples, floor=floor), even=True, multiple=multiple)
        return min((rows, tree), key=lambda groups: self.groups_time(samples, groups, topology=topology))

    def groups_time(self, samples: SizedSamples, groups: Groups, *, topology: Topology) -> int:
        """The largest makespan of a leaf: a stage runs its groups in slot order, each once all its leaves are free."""
        grid = groups.group_grid()
        # A group's leaves are neighbours; a dummy is a group of its own.
        begins = np.ones(grid.shape, dtype=bool)
        begins[1:] = (grid[1:] != grid[:-1]) | (grid[1:] < 0)
        starts = [np.flatnonzero(begins[:, slot]) for slot in range(begins.shape[1])]
        numbers = np.cumsum(begins, axis=0) - 1

        def meet(times: NDArray[np.int64], slots: NDArray[np.int64]) -> NDArray[np.int64]:
            of_columns: list[int] = slots.tolist()
            columns = [
                np.maximum.reduceat(times[:, column], starts[slot])[numbers[:, slot]]
                for column, slot in enumerate(of_columns)
            ]
            return np.stack(columns, axis=1) if columns else times

        costs = groups.cost_grid(samples)
        return int(pipeline_makespans(costs, pp_size=topology.pp_size, vpp_size=topology.vpp_size, meet=meet).max())
