"""Computes when each micro-batch of a step begins and ends on every rank.

    step        a rank's micro-batches follow one another; ranks wait at the end
    microbatch  a slot begins when every rank that meets there has ended the one before
    pipeline    as `step`, on one stage. The planner computes makespans, not the times of single stages, so
                the pipeline's bubble is drawn together with the waiting at the end

Invariants: micro-batches of a rank do not overlap and are in slot order; none ends after `total`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_balance.planner import is_makespan, pipeline_makespans, sync_group_size
from megatron_balance.record.run_record import RunInfo

_WHOLE = 2**40
"""Resolution of integer times: the longest row divided by this."""


@dataclass(frozen=True, eq=False)
class Timeline:
    """One step.

    Attributes:
        starts: `[dp_size, num_microbatches]`, in the unit of the durations.
        durations: `[dp_size, num_microbatches]`.
        total: end of the step, until which ranks wait.
    """

    starts: NDArray[np.float64]
    durations: NDArray[np.float64]
    total: float

    @property
    def idle_fraction(self) -> float:
        """Waiting time as a fraction of all ranks' time."""
        all_time = self.total * len(self.durations)
        return 1 - float(self.durations.sum()) / all_time if all_time else 0.0


def step_timeline(durations: NDArray[np.float64], *, info: RunInfo, with_bubble: bool = True) -> Timeline:
    """Place a step's micro-batches in time.

    Args:
        durations: `[dp_size, num_microbatches]` of one pipeline stage.
        info: objective and topology, which say where ranks wait.
        with_bubble: add the pipeline's bubble; measured times do not contain it.
    """
    span = sync_group_size(info.objective, topology=info.topology)
    num_slots = durations.shape[1]
    slowest = durations.reshape(-1, span, num_slots).max(axis=1)
    ends = np.cumsum(slowest, axis=1)
    starts = np.repeat(ends - slowest, span, axis=0)
    total = float(ends[:, -1].max())
    if with_bubble and total and info.topology.pp_size > 1 and is_makespan(info.objective, topology=info.topology):
        total = max(total, _makespan(durations, info=info))
    return Timeline(starts, durations, total)


def _makespan(durations: NDArray[np.float64], *, info: RunInfo) -> float:
    topology = info.topology
    span = sync_group_size(info.objective, topology=topology)
    of_groups = durations.reshape(-1, span, durations.shape[1]).max(axis=1)
    longest = float(of_groups.sum(axis=1).max())
    # The cost of a micro-batch over all stages is its cost on one stage times their number.
    costs = np.rint(of_groups / longest * _WHOLE).astype(np.int64) * topology.pp_size
    makespans = pipeline_makespans(costs, pp_size=topology.pp_size, vpp_size=topology.vpp_size)
    return float(makespans.max()) / _WHOLE * longest
