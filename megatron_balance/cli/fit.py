"""Fit the seconds of a cost model to a recorded run, for plans by seconds in place of FLOPs.

Reads the micro-batches that a run with --balance-record has measured, and writes seconds.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cli.output import check_writable
from megatron_balance.cost.calibration import Calibration
from megatron_balance.cost.fit import Fit, core_of, fit_microbatches
from megatron_balance.errors import BalanceError
from megatron_balance.record import RunInfo, RunRecord, StepRecord, read_record
from megatron_balance.record.judging import is_slowest

_EPILOG = """\
examples:
  torchrun … train.py … --balance-data --balance-by-flops --balance-record record --train-iters 20
  megatron-balance fit record --out seconds.json
  torchrun … train.py … --balance-data --balance-by-flops --balance-cost seconds.json
  megatron-balance compare lengths.npz … --cost seconds.json

Three steps are enough where lengths differ. The first step of a run is left out where three others were measured. Costs
are of this model, precision and kind of GPU; other tensor- and context-parallel sizes are taken to share them evenly.
"""

NOTABLE_ERROR = 0.2
"""A median error above this is warned of."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `fit`."""
    parser.epilog = _EPILOG
    parser.add_argument("record", type=Path, metavar="RECORD", help="folder that --balance-record of a run names")
    parser.add_argument(
        "--out", type=Path, default=Path("seconds.json"), metavar="FILE", help="file to write (default: seconds.json)"
    )


def run(args: argparse.Namespace) -> int:
    """Fit, write, and say how good the fit is."""
    check_writable(args.out, flag="--out")
    record = read_record(args.record)
    features, seconds, steps = _measured(record)
    fit = fit_microbatches(features, seconds=seconds, steps=steps, cost_model=record.info.cost_model)
    longest = max(int(step.segment_lengths.max()) for step in record.steps)
    costs = _costs(fit, info=record.info, longest=longest, num_measured=seconds.size)
    try:
        costs.write(args.out)
    except OSError as error:
        raise BalanceError(f"--out is {str(args.out)!r}: it cannot be written ({error.strerror}).") from error
    num_steps = np.unique(steps).size
    print(f"Fitted to {seconds.size} micro-batches of {num_steps} steps. {_text(costs)}")
    print(f"On steps that were not fitted it is off by {fit.error:.1%} (median), {fit.worst:.1%} at worst.")
    if fit.error > NOTABLE_ERROR:
        print("Warning: that is much. Record more steps, on ranks with nothing else to do, or plan by FLOPs.")
    if fit.scaled:
        print("Attention was not told apart from the rest better than FLOPs do: it keeps its ratio to it in FLOPs.")
    print(f"Sequences had up to {longest} tokens. Longer ones are extrapolated: record some if you train on them.")
    print(f"Written to {args.out}. Use it: compare --cost {args.out}, or --balance-cost {args.out} in training.")
    return 0


def _measured(record: RunRecord) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """Features, seconds and step of every micro-batch that was measured and waited for no other rank."""
    parts: list[tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]] = []
    for step in record.steps:
        features = step_features(step, info=record.info)
        chosen = is_slowest(step, info=record.info) & np.isfinite(step.seconds) & (features[..., 1] > 0)
        if chosen.any():
            count = int(chosen.sum())
            parts.append((features[chosen], step.seconds[chosen], np.full(count, step.iteration, dtype=np.int64)))
    if len(parts) > 3 and record.steps[0].iteration == 1:
        parts = parts[1:]  # it allocates memory, compiles and connects
    if not parts:
        raise BalanceError(
            "the record has no measured micro-batch: the run ended before its first seconds were written, or it has a "
            "virtual pipeline, whose micro-batches are not measured one by one."
        )
    features, seconds, steps = (np.concatenate(column) for column in zip(*parts, strict=True))
    return features, seconds, steps


def step_features(step: StepRecord, *, info: RunInfo) -> NDArray[np.float64]:
    """`[num_rows, num_microbatches, 5]` features of a step's micro-batches, as `fit_microbatches` takes them."""
    topology, cost_model, grid = info.topology, info.cost_model, step.cost_grid
    sizes = np.ones(grid.shape, dtype=np.int64) if step.cp_sizes is None else step.cp_sizes
    slots = np.repeat(step.slot_of, step.num_segments)
    of_segments = sizes.ravel()[slots]
    padded = np.zeros(slots.size, dtype=np.int64)
    for size in np.unique(of_segments).tolist():
        here = of_segments == size
        there = topology.at_cp_size(size) if step.cp_sizes is not None else topology
        padded[here] = there.padded_seq_len(step.segment_lengths[here])

    def per_slot(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.bincount(slots, weights=values, minlength=grid.size).reshape(grid.shape)

    tokens = per_slot(padded / of_segments)
    linear = cost_model.linear + cost_model.expert_linear
    shared = cost_model.expert_linear / linear if linear and step.cp_sizes is None else 0.0
    if shared:  # expert-parallel ranks compute the tokens of routed experts together
        of_groups = tokens.reshape(-1, topology.ep_span, step.num_microbatches)
        tokens = (1 - shared) * tokens + shared * np.repeat(of_groups.mean(axis=1), topology.ep_span, axis=0)
    columns = [
        np.ones(grid.shape),
        per_slot(np.ones(slots.size)),
        tokens,
        per_slot(core_of(padded, cost_model=cost_model) / of_segments),
        tokens * (np.maximum(sizes, 1) - 1),
    ]
    features = np.stack(columns, axis=-1)
    if step.cp_sizes is not None:  # samples of a group are noted on its first leaf
        leaves, columns_of_slots = np.indices(grid.shape)
        features = features[leaves - leaves % np.maximum(sizes, 1), columns_of_slots]
    return features


def _costs(fit: Fit, *, info: RunInfo, longest: int, num_measured: int) -> Calibration:
    """The fit as the seconds of the whole model on one rank."""
    topology, model = info.topology, info.cost_model
    stages = topology.pp_size  # seconds are those of the first one
    ranks = stages * topology.tp_size * (1 if topology.dynamic_cp else topology.cp_size)
    per_microbatch, per_sequence, per_token, per_core, per_received = fit.coefficients.tolist()
    linear = model.linear + model.expert_linear
    shared = model.expert_linear / linear if linear else 0.0
    has_core = bool(model.quadratic or model.windows)
    exchange = per_received * ranks if topology.dynamic_cp else None
    return Calibration(
        per_microbatch=per_microbatch * stages,
        per_sequence=per_sequence * stages,
        linear=per_token * ranks * (1 - shared),
        expert_linear=per_token * ranks * shared,
        quadratic=per_core * ranks * (model.quadratic if has_core else 1),
        windows=tuple((window, per_core * ranks * each) for window, each in model.windows),
        cp_exchange=exchange,
        cp_exchange_between_nodes=exchange,
        held_out_error=fit.error,
        origin={**info.origin, "longest_sequence": longest, "num_microbatches": num_measured, "policy": info.policy},
    )


def _text(costs: Calibration) -> str:
    squared = f", {costs.quadratic * 1e12:.3g} ps a squared token" if costs.quadratic else ""
    return (
        f"A micro-batch takes {costs.per_microbatch * 1e3:.3g} ms, and {costs.per_sequence * 1e6:.3g} us a sequence, "
        f"{(costs.linear + costs.expert_linear) * 1e6:.3g} us a token{squared}."
    )
