"""Measures the seconds of a model's micro-batches on this device, layer by layer, and fits a cost model.

Each kind of layer that the model has runs by itself, a few layers deep, and so do embedding and output layer;
the model is their sum. So a model that does not fit one device can be calibrated on it.

    1. a grid of micro-batches (number of sequences x length) is timed for every part
    2. of each part, seconds = per_microbatch + per_sequence*n + linear*ΣL + quadratic*Σpairs(L), fitted robustly
    3. parts are added up, as often as the model has them
    4. the error of the sum is measured on micro-batches of mixed lengths that were not fitted
    5. over several ranks (torchrun), layers run at context-parallel sizes 2, 4, … as well: what a micro-batch takes
       beyond its part of the computing is what receiving keys and values costs (`exchange.py`)

Invariants: the shapes of a round are timed in a shuffled order, so that a slow phase of the machine disturbs
all equally; the first round warms up and is not kept; a time is the median of its rounds, the mean of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_balance.cost.calibration import Calibration
from megatron_balance.cost.fitting import fit_seconds
from megatron_balance.errors import BalanceError
from megatron_balance.mcore.calibration.exchange import (
    ExchangeFit,
    SharedLayers,
    fit_exchange,
    shared_layers,
)
from megatron_balance.mcore.calibration.microbatches import SHORTEST, grid_of, mixed_microbatches
from megatron_balance.mcore.calibration.parts import Part, ends_part, layer_parts, measure
from megatron_balance.mcore.calibration.timed_model import process_groups
from megatron_balance.model.flops import mixer_flops, moe_flops
from megatron_balance.model.layers import Layer
from megatron_balance.model.shape import ModelShape
from megatron_balance.runtime.environment import environment
from megatron_balance.runtime.nodes import local_world_size


def calibrate(
    shape: ModelShape,
    *,
    max_tokens: int,
    device: str,
    dtype: torch.dtype,
    num_layers: int = 2,
    repeats: int = 3,
    recompute: bool = False,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Calibration:
    """Measure and fit. Call `enable_cpu()` before importing this module where `device` is `cpu`.

    Args:
        shape: the model.
        max_tokens: of the largest micro-batch.
        device: `cuda` or `cpu`.
        dtype: of weights and activations.
        num_layers: layers of a kind that run together.
        repeats: rounds that are kept.
        recompute: layers are recomputed in the backward pass.
        seed: of the held-out lengths and of the order of measurements.
        progress: called with the measurements done and their total.

    Raises:
        BalanceError: a size is too small, or a kind of layer cannot be built here.
    """
    for name, value, least in (
        ("max_tokens", max_tokens, 4 * SHORTEST),
        ("num_layers", num_layers, 1),
        ("repeats", repeats, 1),
    ):
        if value < least:
            raise BalanceError(f"{name} is {value}: it must be at least {least}.")
    rng = np.random.default_rng(seed)
    grid, held_out = grid_of(max_tokens), mixed_microbatches(max_tokens, rng=rng)
    with process_groups(device=device, seed=seed + 1):
        options: dict[str, Any] = {"device": device, "dtype": dtype, "recompute": recompute}
        parts = [*layer_parts(shape, num_layers=num_layers, options=options), ends_part(shape, options=options)]
        num_ranks = dist.get_world_size()
        shared = shared_layers(
            shape, num_ranks=num_ranks, max_tokens=max_tokens, num_layers=num_layers, rng=rng, options=options
        )
        jobs = [(part, lengths) for part in parts for lengths in grid + held_out]
        num_alone = len(jobs)
        jobs += [job for run in shared for job in run.jobs]
        all_seconds = measure(jobs, repeats=repeats, rng=rng, progress=progress)
    seconds = all_seconds[:num_alone].reshape(len(parts), -1)
    fits = [
        fit_seconds(part.features(grid), seconds=of_part[: len(grid)])
        for part, of_part in zip(parts, seconds, strict=True)
    ]
    times = np.array([part.times for part in parts])
    measured = times @ seconds
    predicted = times @ np.stack([part.features(grid + held_out) @ fit for part, fit in zip(parts, fits, strict=True)])
    errors = np.abs(predicted / measured - 1)[len(grid) :]
    within, between = _exchanges(
        shared, seconds=all_seconds[num_alone:], fits={part.name: fit for part, fit in zip(parts, fits, strict=True)}
    )
    exchanges = {"cp_exchange": within, "cp_exchange_between_nodes": between}
    return Calibration(
        **_add_up(parts, fits, shape=shape),
        cp_exchange=None if within is None else within.seconds,
        cp_exchange_between_nodes=None if between is None else between.seconds,
        held_out_error=float(np.median(errors)),
        origin={
            **environment(device),
            "dtype": str(dtype).removeprefix("torch."),
            "recompute": recompute,
            "max_tokens": max_tokens,
            "num_layers": num_layers,
            "repeats": repeats,
            "seed": seed,
            "num_ranks": num_ranks,
            "exchange": {name: fit.origin for name, fit in exchanges.items() if fit is not None},
            "held_out_error_worst": float(errors.max()),
            "parts": {part.name: [part.times, *fit.tolist()] for part, fit in zip(parts, fits, strict=True)},
            "shape": asdict(shape),
        },
        measurements=tuple(
            {"lengths": list(lengths), "seconds": m, "predicted": p, "held_out": index >= len(grid)}
            for index, (lengths, m, p) in enumerate(
                zip(grid + held_out, measured.tolist(), predicted.tolist(), strict=True)
            )
        ),
    )


def _exchanges(
    shared: list[SharedLayers], *, seconds: NDArray[np.float64], fits: dict[str, NDArray[np.float64]]
) -> tuple[ExchangeFit | None, ExchangeFit | None]:
    """Within a node and between nodes, where they were measured; sizes rise, so those within a node are first."""
    within = [run for run in shared if run.cp_size <= (local_world_size() or 1)]
    num_within = sum(len(run.jobs) for run in within)
    return (
        fit_exchange(within, seconds=seconds[:num_within], fits=fits),
        fit_exchange(shared[len(within) :], seconds=seconds[num_within:], fits=fits),
    )


def _add_up(parts: list[Part], fits: list[NDArray[np.float64]], *, shape: ModelShape) -> dict[str, Any]:
    """The model's coefficients. Of a MoE layer's seconds per token, routed experts take their part of the FLOPs."""
    totals = {"per_microbatch": 0.0, "per_sequence": 0.0, "linear": 0.0, "expert_linear": 0.0, "quadratic": 0.0}
    windows: dict[int, float] = {}
    for part, fit in zip(parts, fits, strict=True):
        per_microbatch, per_sequence, per_token, per_pair = (part.times * fit).tolist()
        routed = _routed_part(part.layer, shape=shape)
        totals["per_microbatch"] += per_microbatch
        totals["per_sequence"] += per_sequence
        totals["linear"] += per_token * (1 - routed)
        totals["expert_linear"] += per_token * routed
        if part.layer is not None and part.layer.window:
            windows[part.layer.window] = windows.get(part.layer.window, 0.0) + per_pair
        else:
            totals["quadratic"] += per_pair
    return totals | {"windows": tuple(sorted(windows.items()))}


def _routed_part(layer: Layer | None, *, shape: ModelShape) -> float:
    """Of a layer's FLOPs per token, those in routed experts."""
    if layer is None or layer.mlp != "moe":
        return 0.0
    flops = mixer_flops(shape, layer=layer) + moe_flops(shape)
    return flops.expert_linear / (flops.linear + flops.expert_linear)
