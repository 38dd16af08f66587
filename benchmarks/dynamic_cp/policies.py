"""Plans of one global batch at one context-parallel size or with sizes of their own, to compare their step times.

All are plans of the same ranks with dynamic sizes, so that one executor runs them and one cost model judges them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cost.model import CostModel
from megatron_balance.planner.build import build_data_schedule
from megatron_balance.planner.dynamic_cp.groups import Groups
from megatron_balance.planner.dynamic_cp.sizing import size_samples
from megatron_balance.planner.dynamic_cp_schedule import DynamicCpSchedule
from megatron_balance.topology import Limits, Topology

POLICIES: Mapping[str, int | None] = {"CP4": 4, "CP2": 2, "dynamic": None}
"""Name → context-parallel size of all micro-batches, None for sizes of their own."""


def policy_of_step(step: int) -> str:
    """The policy of each step where they take turns; who comes first moves on from round to round."""
    names = list(POLICIES)
    rounds, turn = divmod(step, len(names))
    return names[(turn + rounds) % len(names)]


def plan(
    lengths: NDArray[np.int64],
    *,
    cp_size: int | None,
    cost_model: CostModel,
    topology: Topology,
    limits: Limits,
    num_segments: NDArray[np.int64] | None = None,
    home_ranks: NDArray[np.int64] | None = None,
) -> DynamicCpSchedule:
    """This package's plan of a batch, checked; arguments as for `build_data_schedule`."""
    shared: dict[str, Any] = {"limits": limits, "num_segments": num_segments}
    if cp_size is None:
        own = build_data_schedule(lengths, cost_model=cost_model, topology=topology, home_ranks=home_ranks, **shared)
        assert isinstance(own, DynamicCpSchedule)
        return own.check()
    fixed = build_data_schedule(
        lengths,
        cost_model=shared_cost(cost_model, cp_size=cp_size),
        topology=replace(topology.at_cp_size(cp_size), dp_size=topology.num_leaves // cp_size),
        **shared,
    )
    samples, shift = size_samples(lengths, cost_model=cost_model, topology=topology, **shared)
    micro_batches, group_of = np.unique(fixed.slot_of, return_inverse=True)
    groups = Groups(
        group_of,
        np.full(micro_batches.size, cp_size.bit_length() - 1),
        micro_batches // fixed.num_microbatches * cp_size,
        micro_batches % fixed.num_microbatches,
        np.full(topology.num_leaves, fixed.num_microbatches),
    )
    return DynamicCpSchedule.of_groups(
        groups,
        lengths=lengths,
        num_segments=num_segments,
        home_ranks=home_ranks,
        samples=samples,
        cost_shift=shift,
        objective="step",
        algorithm=f"CP{cp_size}",
        lower_bound=0,
        topology=topology,
        limits=limits,
        cost_model=cost_model,
    ).check()


def shared_cost(cost_model: CostModel, *, cp_size: int) -> CostModel:
    """Cost of a sample for each of `cp_size` ranks, its exchange included."""
    return replace(
        cost_model,
        linear=(cost_model.linear + cost_model.cp_exchange * (cp_size - 1)) // cp_size,
        quadratic=cost_model.quadratic // cp_size,
        windows=tuple((window, coefficient // cp_size) for window, coefficient in cost_model.windows),
        cp_exchange=0,
    )


def predicted_cost(schedule: DynamicCpSchedule) -> int:
    """Time of a plan, in the cost model's units."""
    return schedule.predicted_cost << schedule.cost_shift
