"""The time of a step: which ranks wait for one another in every micro-batch, and how micro-batches pass a pipeline.

    step        ranks meet once a step, at the gradient reduction: the largest sum over a rank's micro-batches
    microbatch  ranks meet in every micro-batch (`Topology.sync_size`: experts, FSDP, FP8's delayed scaling): the
                sum over slots of the costliest rank that meets there, of the slowest group
    pipeline    ranks meet once, after a one-forward-one-backward pipeline: the largest makespan of a rank

With such meetings and pipeline stages, a stage waits for its group in each slot: the time is the largest makespan of
the groups' costliest micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError
from megatron_balance.planner.pipeline import Pipeline, makespans
from megatron_balance.topology import Topology

Ints = NDArray[np.int64]

OBJECTIVES = ("auto", "step", "microbatch", "pipeline")
"""Names that `--balance-objective` and `build_data_schedule` take."""


@dataclass(frozen=True)
class Waiting:
    """Where ranks wait for one another under an objective."""

    span: int  # neighbouring ranks that meet in every micro-batch; 1 where ranks meet once a step
    in_slots: bool  # they meet in every micro-batch even without shared work: reports draw slots aligned
    pipeline: Pipeline  # that micro-batches pass; one stage where their times add up

    @property
    def is_makespan(self) -> bool:
        """True if micro-batches pass several stages."""
        return self.pipeline.num_stages > 1

    def times(self, slot_times: Ints) -> Ints:
        """Time of each group, `[num_groups]`, for `[num_groups, num_microbatches]` costs in slot order."""
        return makespans(slot_times[:, None], self.pipeline) if self.is_makespan else slot_times.sum(axis=1)

    def at_least(self, work: int, *, launch: int, longest: int = 0) -> int:
        """A time that a group of this much work cannot beat; `longest`: lower bound on its costliest micro-batch.

        A pipeline's stage also idles while one empty micro-batch passes one chunk of each other stage.
        """
        stages, chunks = self.pipeline.num_stages, self.pipeline.num_chunks
        return max(-(-(work * chunks + (stages - 1) * launch) // (stages * chunks)), longest)


def waiting(objective: str, *, topology: Topology) -> Waiting:
    """Where ranks wait under an objective that is resolved.

    With dynamic context parallelism ranks are leaves: expert-parallel groups meet through the groups that reach over
    several, so that all leaves meet or none.
    """
    in_slots = objective == "microbatch"
    meets = topology.sync_size > 1
    staged = objective == "pipeline" or (in_slots and meets and topology.pp_size > 1)
    if topology.dynamic_cp:
        span = topology.dp_cp_size if in_slots else 1
    elif in_slots:
        span = topology.sync_size if meets else topology.dp_size
    else:
        span = topology.ep_dp_size if objective == "pipeline" else 1
    pipeline = Pipeline(topology.pp_size, topology.vpp_size, topology.microbatch_multiple) if staged else Pipeline()
    return Waiting(span, in_slots=in_slots, pipeline=pipeline)


def resolve_objective(objective: str, *, topology: Topology) -> str:
    """The name of the objective; `auto` is resolved by the topology."""
    if objective not in OBJECTIVES:
        raise BalanceError(f"objective is {objective!r}: it must be one of {', '.join(OBJECTIVES)}.")
    if objective != "auto":
        return objective
    if topology.sync_size > 1:
        return "microbatch"
    return "pipeline" if topology.pp_size > 1 else "step"


def is_makespan(objective: str, *, topology: Topology) -> bool:
    """True if the predicted time is a pipeline's makespan, False if it is the work of all stages together."""
    return waiting(objective, topology=topology).is_makespan or objective == "pipeline"


def organ_pipe_order(costs: Ints) -> Ints:
    """The micro-batch of each slot of a pipeline: small ones at both ends, the largest in the middle.

    The other stages wait for the first forwards and the last backwards, so these should be small.
    """
    rising = np.argsort(costs, axis=1, kind="stable")
    return np.concatenate([rising[:, ::2], rising[:, 1::2][:, ::-1]], axis=1)
