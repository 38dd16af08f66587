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
from megatron_balance.planner import DataSchedule, build_data_schedule
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
) -> DataSchedule:
    """This package's plan of a batch, checked; arguments as for `build_data_schedule`."""
    shared: dict[str, Any] = {"limits": limits, "num_segments": num_segments}
    if cp_size is None:
        own = build_data_schedule(lengths, cost_model=cost_model, topology=topology, home_ranks=home_ranks, **shared)
        return own.check()
    fixed = build_data_schedule(
        lengths,
        cost_model=shared_cost(cost_model, cp_size=cp_size),
        topology=replace(topology.at_cp_size(cp_size), dp_size=topology.num_leaves // cp_size),
        **shared,
    )
    own = build_data_schedule(
        lengths, cost_model=cost_model, topology=topology, objective="step", home_ranks=home_ranks, **shared
    )
    rank, slot = np.divmod(fixed.slot_of, fixed.num_microbatches)
    sizes = np.ones((topology.num_leaves, fixed.num_microbatches), dtype=np.int64)
    for of_rank, of_slot in zip(rank.tolist(), slot.tolist(), strict=True):
        sizes[of_rank * cp_size : (of_rank + 1) * cp_size, of_slot] = cp_size
    slot_of, batch = rank * cp_size * fixed.num_microbatches + slot, own.batch()
    return replace(
        own,
        slot_of=slot_of,
        num_microbatches=fixed.num_microbatches,
        cp_size_grid=sizes,
        cost_grid=batch.cost_grid(slot_of, sizes),
        predicted_cost=batch.time(slot_of, sizes),
        padded_lengths=own.padded(sizes.reshape(-1)[slot_of]),
        algorithm=f"CP{cp_size}",
        lower_bound=0,
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


def predicted_cost(schedule: DataSchedule) -> int:
    """Time of a plan, in the cost model's units."""
    return schedule.predicted_cost << schedule.cost_shift
