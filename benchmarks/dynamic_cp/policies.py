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
from megatron_balance.planner import DataSchedule, Problem, build_data_schedule
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
    home_ranks: NDArray[np.int64] | None = None,
) -> DataSchedule:
    """This package's plan of a batch, checked; arguments as for `build_data_schedule`."""
    options: dict[str, Any] = {
        "cost_model": cost_model,
        "topology": topology,
        "limits": limits,
        "home_ranks": home_ranks,
    }
    if cp_size is None:
        return build_data_schedule(lengths, **options).check()
    fixed = build_data_schedule(
        lengths,
        cost_model=shared_cost(cost_model, cp_size=cp_size),
        topology=replace(topology.with_cp_size(cp_size), dp_size=topology.dp_cp_size // cp_size),
        limits=limits,
    )
    rank, slot = np.divmod(fixed.microbatch_of, fixed.num_microbatches)
    is_run = fixed.slot_counts().reshape(fixed.cp_size_grid.shape) > 0
    return DataSchedule.from_assignment(
        Problem.of(lengths, objective="step", **options),
        rank * cp_size * fixed.num_microbatches + slot,
        np.where(is_run, cp_size, 1).repeat(cp_size, axis=0),
    ).check()


def shared_cost(cost_model: CostModel, *, cp_size: int) -> CostModel:
    """Cost of a sample for each of `cp_size` ranks, its exchange included."""
    return replace(
        cost_model,
        linear=cost_model.linear // cp_size,
        quadratic=cost_model.quadratic // cp_size,
        windows=tuple((window, coefficient // cp_size) for window, coefficient in cost_model.windows),
        cp_exchange=0,
        cp_received=cost_model.cp_exchange * (cp_size - 1) // cp_size,
    )
