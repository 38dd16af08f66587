"""Fits the seconds of a cost model to the micro-batches of a recorded run, and makes a calibration of them."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

from megatron_balance.cost.calibration import (
    LEAST_STEPS,
    UNITS_PER_SECOND,
    Calibration,
    Fit,
    Measurements,
    fit_microbatches,
)
from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.record.run_record import RunInfo, RunRecord
from megatron_balance.record.step import StepRecord

NOTABLE_ERROR = 0.04
"""Median of a fit, above which it is warned of: in the quickstart speeds were then off by more than 3 points."""

MAX_ROUNDS = 5
"""Fits, where ranks that meet contain one another's seconds: whose contain no waiting is what the one before says."""


def fit_record(record: RunRecord) -> tuple[Fit, Calibration]:
    """The fit to a record, and as the seconds of the whole model on one rank; a BalanceError where too little ran."""
    info, topology = record.info, record.info.topology
    longest, sizes = max(int(step.segments.max(initial=0)) for step in record.steps), topology.model_parallel_size
    for _ in range(MAX_ROUNDS):
        measured = measurements(record)
        fit = fit_microbatches(measured, cost_model=info.cost_model)
        calibration = _costs(fit, info=info, longest=longest, num_measured=measured.seconds.size)
        costs = calibration.cost_model(ep_size=topology.ep_size).of_rank(tp_size=sizes)
        costs = replace(costs, stages=info.cost_model.stages)
        steps = tuple(replace(step, cost_model=costs) for step in record.steps)
        pairs = zip(steps, record.steps, strict=True)
        if all(np.array_equal(ours.is_slowest, theirs.is_slowest) for ours, theirs in pairs):
            break
        record = record._replace(steps=steps)  # by these costs other ranks are the slowest of those that meet
    return fit, calibration


def measured_rates(fit: Fit, *, info: RunInfo) -> dict[str, float]:
    """TFLOP/s of one GPU, where the run planned by FLOPs and the record says how they were weighed."""
    model, rate = info.cost_model, info.environment.get("attention_rate")
    _, per_token, per_core = fit.coefficients.tolist()
    if info.cost_name != "flops" or not isinstance(rate, int | float) or not (per_token and per_core):
        return {}
    # A unit of cost is a FLOP that is linear in tokens, or `rate` FLOPs of attention.
    flops = {"linear_tflops": (model.linear + model.expert_linear) / per_token, "attention_tflops": rate / per_core}
    return {name: rate / info.topology.gpus_per_rank / 1e12 for name, rate in flops.items()}


def measurements(record: RunRecord) -> Measurements:
    """All micro-batches that were measured and waited for no other rank."""
    first_slots = np.cumsum([0, *(step.cp_size_grid.size for step in record.steps)]).tolist()
    parts = [
        _step_measurements(step, info=record.info, first_slot=first)
        for step, first in zip(record.steps, first_slots, strict=False)
    ]
    parts = [part for part in parts if part.seconds.size]
    if len(parts) > LEAST_STEPS and parts[0].steps[0] == 1:
        parts = parts[1:]  # it allocates memory, compiles and connects
    if not parts:
        raise BalanceError("the record has no measured micro-batch: the run was too short, or has a virtual pipeline.")
    names = [field.name for field in fields(Measurements)]
    return Measurements(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def _step_measurements(step: StepRecord, *, info: RunInfo, first_slot: int) -> Measurements:
    topology, cost_model, grid = info.topology, info.cost_model, step.cp_size_grid
    # Where all have one size its ranks' costs are fitted together (`gpus_per_rank`).
    sizes = np.maximum(step.cp_size_grid, 1) if topology.dynamic_cp else np.ones(grid.shape, dtype=np.int64)
    slots = step.microbatch_of if step.num_segments is None else np.repeat(step.microbatch_of, step.num_segments)
    size_of, padded = sizes.ravel()[slots], np.zeros(slots.size, dtype=np.int64)
    for size in np.unique(size_of).tolist():
        mask = size_of == size
        ranks = topology.with_cp_size(size) if topology.dynamic_cp else topology
        padded[mask] = ranks.padded_seq_len(step.segments[mask])
    # Samples of a forest add what they do not share with those before them.
    shared_tokens = np.zeros_like(padded) if step.forest is None else padded - step.computed_lengths
    tokens = np.bincount(slots, weights=(padded - shared_tokens) / size_of, minlength=grid.size).reshape(grid.shape)
    linear = cost_model.linear + cost_model.expert_linear
    shared = cost_model.expert_linear / linear if linear and not topology.dynamic_cp else 0.0
    if shared:  # expert-parallel ranks compute the tokens of routed experts together
        group_size = topology.with_cp_size(topology.cp_size).ep_dp_size
        groups = tokens.reshape(-1, group_size, step.num_microbatches)
        tokens = (1 - shared) * tokens + shared * np.repeat(groups.mean(axis=1), group_size, axis=0)
    owners = step.owner_slots()
    mask = step.is_slowest & np.isfinite(step.seconds) & (tokens.ravel()[owners] > 0)
    has_core = bool(cost_model.quadratic or cost_model.windows)
    attention = replace(cost_model, linear=0) if has_core else CostModel(quadratic=1)
    return Measurements(
        seconds=step.seconds[mask],
        steps=np.full(int(mask.sum()), step.iteration, dtype=np.int64),
        slots=owners[mask] + first_slot,
        tokens=tokens.ravel()[owners[mask]],
        microbatch_of=slots + first_slot,
        core=(attention.local_cost(padded) - attention.local_cost(shared_tokens)).astype(np.float64) / size_of,
        received=padded * (size_of - 1) / size_of,
    )


def _costs(fit: Fit, *, info: RunInfo, longest: int, num_measured: int) -> Calibration:
    """The fit as the seconds of the whole model on one rank."""
    model, ranks = info.cost_model, info.topology.gpus_per_rank
    stages = info.topology.pp_size  # seconds are those of the first one
    per_microbatch, per_token, per_core = (fit.coefficients * UNITS_PER_SECOND).tolist()
    linear = model.linear + model.expert_linear
    shared = model.expert_linear / linear if linear else 0.0
    has_core = bool(model.quadratic or model.windows)
    costs = CostModel(
        per_microbatch=round(per_microbatch * stages),
        linear=round(per_token * ranks * (1 - shared)),
        expert_linear=round(per_token * ranks * shared),
        quadratic=round(per_core * ranks * (model.quadratic if has_core else 1)),
        windows=tuple((window, round(per_core * ranks * cost)) for window, cost in model.windows),
        # 0 would say that it was not measured.
        cp_exchange=max(1, round(per_core * fit.exchange * ranks)) if info.topology.dynamic_cp else 0,
    )
    if model.stages is not None:
        costs = model.stages.whole_from_first(costs)
    origin = {"longest_sequence": longest, "num_microbatches": num_measured, "policy": info.policy}
    origin = dict(info.environment) | measured_rates(fit, info=info) | origin
    return Calibration(costs=costs, held_out_error=fit.error, origin=origin)
