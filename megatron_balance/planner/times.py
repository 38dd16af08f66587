"""The time of a step: which ranks wait for one another in every micro-batch, and how micro-batches pass a pipeline.

    step        ranks meet once a step, at the gradient reduction: the largest sum over a rank's micro-batches
    microbatch  ranks meet in every micro-batch (experts spread over ranks, FSDP): the sum over slots of the costliest
                rank that meets there, of the slowest group
    pipeline    ranks meet once, after a one-forward-one-backward pipeline: the largest makespan of a rank

With expert-parallel groups over several ranks and pipeline stages, a stage waits for its group in each slot: the time
is the largest makespan of the groups' costliest micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError
from megatron_balance.topology import Topology

Ints = NDArray[np.int64]
Meeting = Callable[[Ints, Ints], Ints]
"""Maps times `[num_ranks, n]` at which ranks are ready for slots `[n]` to those at which their peers are ready too."""

OBJECTIVES = ("auto", "step", "microbatch", "pipeline")
"""Names that `--balance-objective` and `build_data_schedule` take."""


@dataclass(frozen=True)
class Waiting:
    """Where ranks wait for one another under an objective."""

    span: int  # neighbouring ranks that meet in every micro-batch; 1 where ranks meet once a step
    in_slots: bool  # they meet in every micro-batch even without shared work: reports draw slots aligned
    pp_size: int  # stages of the pipeline that micro-batches pass; 1 where their times add up
    vpp_size: int  # model chunks of a stage

    def times(self, row_times: Ints) -> Ints:
        """Time of each group, `[num_groups]`, for `[num_groups, num_microbatches]` costs in slot order."""
        return pipeline_makespans(row_times, pp_size=self.pp_size, vpp_size=self.vpp_size)

    def at_least(self, work: int, *, launch: int, longest: int = 0) -> int:
        """A time that a group of this much work cannot beat; `longest`: lower bound on its costliest micro-batch.

        A pipeline's stage also idles while one empty micro-batch passes each other stage.
        """
        idle = (self.pp_size - 1) * launch
        return max(-(-(work * self.vpp_size + idle) // (self.pp_size * self.vpp_size)), longest)


def waiting(objective: str, *, topology: Topology) -> Waiting:
    """Where ranks wait under an objective that is resolved.

    With dynamic context parallelism ranks are leaves: expert-parallel groups meet through the groups that reach over
    several, so that all leaves meet or none.
    """
    in_slots = objective == "microbatch"
    spreads_experts = topology.ep_span > 1
    staged = objective == "pipeline" or (in_slots and spreads_experts and topology.pp_size > 1)
    if topology.dynamic_cp:
        span = topology.num_leaves if in_slots else 1
    elif in_slots:
        span = topology.dp_size if topology.fully_sharded or not spreads_experts else topology.ep_span
    else:
        span = topology.ep_span if objective == "pipeline" else 1
    return Waiting(
        span=span,
        in_slots=in_slots,
        pp_size=topology.pp_size if staged else 1,
        vpp_size=topology.vpp_size if staged else 1,
    )


def resolve_objective(objective: str, *, topology: Topology) -> str:
    """The name of the objective; `auto` is resolved by the topology."""
    if objective not in OBJECTIVES:
        raise BalanceError(f"objective is {objective!r}: it must be one of {', '.join(OBJECTIVES)}.")
    if objective != "auto":
        return objective
    if topology.ep_span > 1 or topology.fully_sharded:
        return "microbatch"
    return "pipeline" if topology.pp_size > 1 else "step"


def is_makespan(objective: str, *, topology: Topology) -> bool:
    """True if the predicted time is a pipeline's makespan, False if it is the work of all stages together."""
    return waiting(objective, topology=topology).pp_size > 1 or objective == "pipeline"


def pipeline_makespans(grid: Ints, *, pp_size: int, vpp_size: int = 1, meet: Meeting | None = None) -> Ints:
    """Time from the first forward to the last backward, for every rank.

    One-forward-one-backward (D. Narayanan et al., "Efficient large-scale language model training on GPU clusters using
    Megatron-LM", 2021): stage s of p runs p-1-s forwards, then one forward and one backward in turn, then the backwards
    that are left. A micro-batch of cost c spends c/p on each stage, one third of it forward and two thirds backward.

    In the wavefront below, stage s runs the forward of micro-batch j at tick 2j + s and the backward of micro-batch i
    at tick 2i + 2p - 1 - s. That is the order above on every stage, and what a stage waits for always ended on its
    neighbour at the tick before. So one number a stage is enough: when it is free.

    Interleaving (`vpp_size` chunks a stage) is an approximation: the bubble, makespan minus work of a stage, is divided
    by `vpp_size`, as it is for equal micro-batches. A micro-batch still passes all the layers, so its whole cost stays
    a floor.

    `grid`: costs in slot order. `meet`: who waits before each pass of a slot, where pipelines are not independent.
    """
    num_ranks, num_microbatches = grid.shape
    if pp_size == 1:
        return grid.sum(axis=1)
    # Times are whole in units of 1/(3p) of a cost; costs too large for that lose their last bits, upwards.
    worst = 3 * pp_size * int(grid.sum(axis=1).max())
    shift = max(0, worst.bit_length() - 62)
    costs = -(-grid // (1 << shift))

    free = np.zeros((num_ranks, pp_size), dtype=np.int64)
    stages = np.arange(pp_size)
    for tick in range(2 * (num_microbatches + pp_size - 1)):
        forward = tick - stages
        backward = forward - 2 * pp_size + 1 + 2 * stages
        forwards = stages[(forward % 2 == 0) & (forward >= 0) & (forward < 2 * num_microbatches)]
        backwards = stages[(backward % 2 == 0) & (backward >= 0) & (backward < 2 * num_microbatches)]
        # The first stage waits for no forward, the last for no backward: they are their own neighbours.
        after_forward = np.maximum(free[:, forwards], free[:, np.maximum(forwards - 1, 0)])
        after_backward = np.maximum(free[:, backwards], free[:, np.minimum(backwards + 1, pp_size - 1)])
        if meet is not None:
            after_forward = meet(after_forward, forward[forwards] // 2)
            after_backward = meet(after_backward, backward[backwards] // 2)
        free[:, forwards] = after_forward + costs[:, forward[forwards] // 2]
        free[:, backwards] = after_backward + 2 * costs[:, backward[backwards] // 2]

    work = 3 * costs.sum(axis=1)
    makespans = work + -(-(free.max(axis=1) - work) // vpp_size)
    makespans = -(-makespans // (3 * pp_size)) << shift
    return np.maximum(makespans, grid.max(axis=1))


def mountain_order(costs: Ints) -> Ints:
    """The micro-batch of each slot of a pipeline: small ones at both ends, the largest in the middle.

    The other stages wait for the first forwards and the last backwards, so these should be small.
    """
    rising = np.argsort(costs, axis=1, kind="stable")
    return np.concatenate([rising[:, ::2], rising[:, 1::2][:, ::-1]], axis=1)
