"""Features of a rank's micro-batches on which their seconds depend.

    seconds ≈ per_microbatch*1 + per_sequence*num_sequences + linear*tokens + attention*core + cp_exchange*received

`core` is the attention of the cost model: `Σ quadratic*L² + Σ_w window_w*pairs(L, w)`. Its terms keep the proportions
of the model's shape, since lengths seen in training seldom separate them. `received` are tokens whose keys and values
come from other context-parallel ranks under dynamic context parallelism: each of c ranks computes a c-th part of
tokens and core, and receives (c-1)/c of the tokens. Otherwise it is 0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cost.model import CostModel
from megatron_balance.planner.objectives import OBJECTIVES
from megatron_balance.planner.schedule import DataSchedule

NUM_FEATURES = 5
"""1, sequences, tokens, core, received."""

RECEIVED = 4
"""The column of received tokens."""


def slot_features(schedule: DataSchedule, *, rank: int, cost_model: CostModel) -> NDArray[np.float64]:
    """Features of one rank's micro-batches.

    Tokens in routed experts are computed by the expert-parallel group together, each rank an even part: that
    part of a micro-batch's tokens is the group's mean.

    Args:
        schedule: the plan.
        rank: data-parallel rank.
        cost_model: FLOPs or seconds: gives the shares of attention kinds and of routed experts.

    Returns:
        `[num_microbatches, 5]` float64: 1, sequences, padded tokens, core, received tokens; a leaf has as many
        micro-batches as it runs.
    """
    if schedule.topology.dynamic_cp:
        return _leaf_features(schedule, leaf=rank, cost_model=cost_model)
    num_microbatches, topology = schedule.num_microbatches, schedule.topology
    own = slice(rank * num_microbatches, (rank + 1) * num_microbatches)
    segments = schedule.lengths if schedule.segment_lengths is None else schedule.segment_lengths
    slots = schedule.slot_of if schedule.num_segments is None else np.repeat(schedule.slot_of, schedule.num_segments)

    def per_slot(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.bincount(slots, weights=values, minlength=topology.dp_size * num_microbatches)

    padded = topology.padded_seq_len(segments)
    tokens = per_slot(padded.astype(np.float64))
    of_group = tokens.reshape(-1, topology.ep_span, num_microbatches)[rank // topology.ep_span].mean(axis=0)
    shared = _expert_part(cost_model)
    return np.column_stack(
        [
            np.ones(num_microbatches),
            per_slot(np.ones(segments.size))[own],
            (1 - shared) * tokens[own] + shared * of_group,
            per_slot(_core(padded, cost_model=cost_model))[own],
            np.zeros(num_microbatches),
        ]
    )


def _leaf_features(schedule: DataSchedule, *, leaf: int, cost_model: CostModel) -> NDArray[np.float64]:
    """Features of a leaf. Routed experts count as in the plan: as if each rank computed its own tokens'."""
    segments = schedule.lengths if schedule.segment_lengths is None else schedule.segment_lengths
    counts = np.ones(schedule.lengths.size, np.int64) if schedule.num_segments is None else schedule.num_segments
    of_samples = np.split(segments, np.cumsum(counts)[:-1])
    rows: list[list[float]] = []
    for sample_ids, size in zip(schedule.ranks[leaf], schedule.cp_sizes[leaf], strict=True):
        lengths = np.concatenate([of_samples[sample] for sample in sample_ids]) if sample_ids else segments[:0]
        padded = schedule.topology.at_cp_size(size).padded_seq_len(lengths)
        tokens, core = float(padded.sum()) / size, float(_core(padded, cost_model=cost_model).sum()) / size
        rows.append([1.0, float(padded.size), tokens, core, tokens * (size - 1)])
    return np.array(rows)


def cost_model_of(coefficients: NDArray[np.float64], *, cost_model: CostModel, units_per_second: int) -> CostModel:
    """The cost model from coefficients of the features of `slot_features`.

    Args:
        coefficients: `[5]` seconds per micro-batch, sequence, token, unit of core and received token; `[4]` without
            the last, which then keeps its ratio to the linear cost in `cost_model`.
        cost_model: the cost model that the features were computed with.
        units_per_second: of the result's costs.
    """
    scaled = [float(value) * units_per_second for value in coefficients]
    per_microbatch, per_sequence, per_token, per_core = scaled[:RECEIVED]
    shared = _expert_part(cost_model)
    per_received = scaled[RECEIVED] if len(scaled) > RECEIVED else per_token * exchange_part(cost_model)
    return CostModel(
        linear=round(per_token * (1 - shared)),
        expert_linear=round(per_token * shared),
        quadratic=round(per_core * cost_model.quadratic),
        windows=tuple((window, round(per_core * each)) for window, each in cost_model.windows),
        per_sequence=round(per_sequence),
        per_microbatch=round(per_microbatch),
        cp_exchange=round(per_received),
    )


def coefficients_of(cost_model: CostModel) -> NDArray[np.float64]:
    """`[5]` the cost model's own coefficients, in its own units: features times these are its costs."""
    return np.array(
        [
            cost_model.per_microbatch,
            cost_model.per_sequence,
            cost_model.linear + cost_model.expert_linear,
            1.0,
            cost_model.cp_exchange,
        ]
    )


def exchange_part(cost_model: CostModel) -> float:
    """Cost of receiving a token's keys and values, as a fraction of the linear cost of a token."""
    linear = cost_model.linear + cost_model.expert_linear
    return cost_model.cp_exchange / linear if linear else 0.0


def is_slowest(schedule: DataSchedule, *, rank: int) -> NDArray[np.bool_]:
    """`[num_microbatches]` True where the rank is the costliest of those it meets.

    If ranks meet in every micro-batch, the measured time of the others contains waiting. If they meet once a step, all
    entries are True. Leaves that share a micro-batch have the same cost.
    """
    topology = schedule.topology
    if topology.dynamic_cp:
        own = schedule.cost_grid[rank, : len(schedule.cp_sizes[rank])]
        if topology.ep_size == 1 and not topology.fully_sharded:
            return np.ones(own.size, dtype=np.bool_)
        return own == schedule.cost_grid.max(axis=0)
    if topology.ep_span == 1 and not topology.fully_sharded:
        return np.ones(schedule.num_microbatches, dtype=np.bool_)
    # For every objective: the ranks that wait for one another in a micro-batch.
    span = OBJECTIVES["microbatch"].sync_group_size(topology)
    grid = schedule.cost_grid.reshape(-1, span, schedule.num_microbatches)
    slowest = grid.max(axis=1)[rank // span]
    return schedule.cost_grid[rank] == slowest


def _expert_part(cost_model: CostModel) -> float:
    """The fraction of a token's linear cost that routed experts make up, from 0 to 1."""
    linear = cost_model.linear + cost_model.expert_linear
    return cost_model.expert_linear / linear if linear else 0.0


def _core(lengths: NDArray[np.int64], *, cost_model: CostModel) -> NDArray[np.float64]:
    """`[num_segments]` attention cost of each sequence."""
    if not cost_model.quadratic and not cost_model.windows:
        return np.zeros(lengths.size)
    attention = CostModel(quadratic=cost_model.quadratic, windows=cost_model.windows)
    unique, inverse = np.unique(lengths, return_inverse=True)
    return np.array([float(attention(length)) for length in unique.tolist()])[inverse]
