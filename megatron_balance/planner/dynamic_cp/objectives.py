"""Objectives over groups of leaves.

An objective says who meets when, makes a plan, and gives a time that no plan can beat:

    step        leaves meet in their groups and at the gradient reduction: the fullest leaf. From the root down all
                leaves of a group come to it at the same time, so that none waits.
    microbatch  all leaves meet in every slot (experts spread over ranks, FSDP): the sum over slots of the costliest
                group, and with experts in a pipeline the makespan of these. Expert-parallel groups of fewer
                leaves meet one another through the groups that reach over several.
    pipeline    every stage runs its groups in the order of slots, and a group waits for its slowest member:
                the largest makespan
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError
from megatron_balance.planner.dynamic_cp.bound import least_time
from megatron_balance.planner.dynamic_cp.groups import Groups
from megatron_balance.planner.dynamic_cp.node_packs import pack_nodes
from megatron_balance.planner.dynamic_cp.rows import place_in_rows
from megatron_balance.planner.dynamic_cp.samples import SizedSamples
from megatron_balance.planner.dynamic_cp.tree import place_on_tree
from megatron_balance.planner.makespan import pipeline_makespans
from megatron_balance.planner.objectives import is_makespan
from megatron_balance.topology import Topology


@dataclass(frozen=True)
class GroupObjective:
    """One objective.

    Attributes:
        place: makes a plan, given a lower bound on the work of the fullest leaf.
        time: predicted time of a plan.
        bound: lower bound on the time of any plan.
        even_slots: all leaves have the same number of slots, on every topology.
    """

    place: Callable[[SizedSamples, Topology, int], Groups]
    _: KW_ONLY
    time: Callable[[SizedSamples, Topology, Groups], int]
    bound: Callable[[SizedSamples, Topology, int], int]
    even_slots: bool

    def has_even_slots(self, topology: Topology) -> bool:
        """All leaves have the same number of slots, a multiple of `microbatch_multiple`."""
        return self.even_slots or topology.has_even_slots

    def work_floor(self, samples: SizedSamples, topology: Topology) -> int:
        """Lower bound on the work of the fullest leaf, from which `place` and `bound` start."""
        return least_time(samples, even=self.has_even_slots(topology))


def group_objective(name: str) -> GroupObjective:
    """The objective of this name.

    Raises:
        BalanceError: it plans at one context-parallel size only.
    """
    if name not in GROUP_OBJECTIVES:
        raise BalanceError(
            f"objective is {name!r}: with Topology.dynamic_cp it must be one of {', '.join(GROUP_OBJECTIVES)}."
        )
    return GROUP_OBJECTIVES[name]


def cost_grid(samples: SizedSamples, groups: Groups) -> NDArray[np.int64]:
    """Cost of every leaf in every slot, `[num_leaves, max(num_slots)]`: dummies cost `per_microbatch`, no slot 0."""
    of_groups = np.full(groups.levels.size, samples.per_microbatch, dtype=np.int64)
    np.add.at(of_groups, groups.group_of, samples.costs_at(groups.levels[groups.group_of]))
    grid = groups.group_grid()
    costs = np.full(grid.shape, samples.per_microbatch, dtype=np.int64)
    slots = np.arange(int(groups.num_slots.max()))
    costs[np.greater_equal(slots, groups.num_slots.reshape(-1, 1))] = 0
    held = grid >= 0
    costs[held] = of_groups[grid[held]]
    return costs


def _place_step(samples: SizedSamples, topology: Topology, floor: int) -> Groups:
    nodes = place_on_tree(samples, floor=floor)
    return pack_nodes(samples, nodes, even=topology.has_even_slots, multiple=topology.microbatch_multiple)


def _step_time(samples: SizedSamples, topology: Topology, groups: Groups) -> int:
    return int(cost_grid(samples, groups).sum(axis=1).max())


def _place_rows(samples: SizedSamples, topology: Topology, floor: int) -> Groups:
    pipelined = is_makespan("microbatch", topology=topology)
    return place_in_rows(
        samples,
        floor=floor,
        multiple=topology.microbatch_multiple,
        pp_size=topology.pp_size if pipelined else 1,
        vpp_size=topology.vpp_size,
    )


def _row_time(samples: SizedSamples, topology: Topology, groups: Groups) -> int:
    heights = cost_grid(samples, groups).max(axis=0, keepdims=True)
    if is_makespan("microbatch", topology=topology):
        return int(pipeline_makespans(heights, pp_size=topology.pp_size, vpp_size=topology.vpp_size)[0])
    return int(heights.sum())


def _place_pipeline(samples: SizedSamples, topology: Topology, floor: int) -> Groups:
    """Rows, or the tree where it is quicker: its groups wait for one another less often."""
    rows = place_in_rows(
        samples,
        floor=floor,
        multiple=topology.microbatch_multiple,
        pp_size=topology.pp_size,
        vpp_size=topology.vpp_size,
    )
    nodes = place_on_tree(samples, floor=floor)
    candidates = (rows, pack_nodes(samples, nodes, even=True, multiple=topology.microbatch_multiple))
    return min(candidates, key=lambda groups: _pipeline_time(samples, topology, groups))


def _pipeline_time(samples: SizedSamples, topology: Topology, groups: Groups) -> int:
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

    costs = cost_grid(samples, groups)
    return int(pipeline_makespans(costs, pp_size=topology.pp_size, vpp_size=topology.vpp_size, meet=meet).max())


def _work_bound(samples: SizedSamples, topology: Topology, floor: int) -> int:
    return floor


def _row_bound(samples: SizedSamples, topology: Topology, floor: int) -> int:
    return _pipeline_bound(samples, topology, floor) if is_makespan("microbatch", topology=topology) else floor


def _pipeline_bound(samples: SizedSamples, topology: Topology, floor: int) -> int:
    """A stage works the p-th part; at both ends it idles for at least an empty micro-batch on the other stages."""
    idle = (topology.pp_size - 1) * samples.per_microbatch
    return -(-(floor * topology.vpp_size + idle) // (topology.pp_size * topology.vpp_size))


GROUP_OBJECTIVES = {
    "step": GroupObjective(_place_step, time=_step_time, bound=_work_bound, even_slots=False),
    "microbatch": GroupObjective(_place_rows, time=_row_time, bound=_row_bound, even_slots=True),
    "pipeline": GroupObjective(_place_pipeline, time=_pipeline_time, bound=_pipeline_bound, even_slots=True),
}
