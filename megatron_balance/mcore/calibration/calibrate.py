"""Measures the seconds of a model's micro-batches on this device, layer by layer, and fits a cost model.

Each kind of layer that the model has runs by itself, a few layers deep, and so do embedding and output layer;
the model is their sum. So a model that does not fit one device can be calibrated on it.

    1. a grid of micro-batches (number of sequences x length) is timed for every part
    2. of each part, seconds = per_microbatch + per_sequence*n + linear*ΣL + quadratic*Σpairs(L), fitted robustly
    3. parts are added up, as often as the model has them
    4. the error of the sum is measured on micro-batches of mixed lengths that were not fitted

Invariants: the shapes of a round are timed in a shuffled order, so that a slow phase of the machine disturbs
all equally; the first round warms up and is not kept; a time is the median of its rounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_balance.cost.calibration import Calibration
from megatron_balance.cost.fitting import fit_seconds
from megatron_balance.errors import BalanceError
from megatron_balance.mcore.calibration.timed_model import TimedModel, single_process
from megatron_balance.model.flops import causal_pairs, mixer_flops, moe_flops
from megatron_balance.model.layers import Layer
from megatron_balance.model.shape import ModelShape
from megatron_balance.runtime.environment import environment

SHORTEST = 64
"""Tokens of the shortest sequences in the grid."""

NUM_HELD_OUT = 16
"""Micro-batches of mixed lengths that judge the fit."""

Lengths = tuple[int, ...]


@dataclass(frozen=True)
class _Part:
    """A part of the model that is timed by itself.

    Attributes:
        name: for people.
        times: how often the whole model has what was timed.
        layer: the kind of layer; None for embedding, output layer and loss.
        model: what runs.
    """

    name: str
    times: float
    layer: Layer | None
    model: TimedModel

    def features(self, microbatches: list[Lengths]) -> NDArray[np.float64]:
        """`[num_microbatches, 4]`: 1, sequences, tokens, and twice the pairs of query and key."""
        return np.array([[1.0, len(lengths), sum(lengths), sum(map(self._pairs, lengths))] for lengths in microbatches])

    def _pairs(self, length: int) -> int:
        if self.layer is None or self.layer.mixer not in ("attention", "mla"):
            return 0
        return causal_pairs(length, window=self.layer.window or length)


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
    with single_process(seed=seed + 1):
        options: dict[str, Any] = {"device": device, "dtype": dtype, "recompute": recompute}
        parts = _parts(shape, num_layers=num_layers, options=options)
        seconds = _measure(parts, grid + held_out, repeats=repeats, rng=rng, progress=progress)
    fits = [
        fit_seconds(part.features(grid), seconds=of_part[: len(grid)])
        for part, of_part in zip(parts, seconds, strict=True)
    ]
    times = np.array([part.times for part in parts])
    measured = times @ seconds
    predicted = times @ np.stack([part.features(grid + held_out) @ fit for part, fit in zip(parts, fits, strict=True)])
    errors = np.abs(predicted / measured - 1)[len(grid) :]
    return Calibration(
        **_add_up(parts, fits, shape=shape),
        held_out_error=float(np.median(errors)),
        origin={
            **environment(device),
            "dtype": str(dtype).removeprefix("torch."),
            "recompute": recompute,
            "max_tokens": max_tokens,
            "num_layers": num_layers,
            "repeats": repeats,
            "seed": seed,
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


def grid_of(max_tokens: int) -> list[Lengths]:
    """Micro-batches of one length each: lengths by powers of two, sequences by powers of four, and full ones."""
    grid: list[Lengths] = []
    length = SHORTEST
    while length <= max_tokens:
        counts = {4**power for power in range(16) if 4**power * length <= max_tokens} | {max_tokens // length}
        grid += [(length,) * count for count in sorted(counts)]
        length *= 2
    return grid


def mixed_microbatches(max_tokens: int, *, rng: np.random.Generator) -> list[Lengths]:
    """`NUM_HELD_OUT` micro-batches of lognormal lengths, filled to between an eighth of `max_tokens` and `max_tokens`.

    None holds one sequence alone, as the grid does.
    """
    microbatches: list[Lengths] = []
    for target in np.geomspace(max_tokens / 8, max_tokens, NUM_HELD_OUT):
        lengths: list[int] = []
        left = int(target)
        while left > 0:
            length = int(np.clip(rng.lognormal(np.log(max_tokens / 8), 1.0), 1, min(left, 3 * target / 4)))
            lengths.append(length)
            left -= length
        microbatches.append(tuple(lengths))
    return microbatches


def _parts(shape: ModelShape, *, num_layers: int, options: dict[str, Any]) -> list[_Part]:
    kinds = Counter((*shape.decoder_layers(), *shape.mtp_layers()))
    parts = [
        _Part(
            _name(layer),
            times=count / num_layers,
            layer=layer,
            model=TimedModel(shape.stack_of(layer, num_layers=num_layers), part="layers", **options),
        )
        for layer, count in kinds.items()
    ]
    stack = shape.stack_of(next(iter(kinds)), num_layers=1)
    ends = TimedModel(stack, part="ends", **options)
    return [*parts, _Part("ends", times=1 + shape.mtp_num_layers, layer=None, model=ends)]


def _name(layer: Layer) -> str:
    window = f" window {layer.window}" if layer.window else ""
    return " + ".join(filter(None, (layer.mixer, layer.mlp))) + window


def _measure(
    parts: list[_Part],
    microbatches: list[Lengths],
    *,
    repeats: int,
    rng: np.random.Generator,
    progress: Callable[[int, int], None],
) -> NDArray[np.float64]:
    """`[num_parts, num_microbatches]` seconds, medians over the rounds."""
    rounds = np.empty((repeats + 1, len(parts), len(microbatches)))
    jobs = [(part, index) for part in range(len(parts)) for index in range(len(microbatches))]
    done = 0
    for one_round in rounds:
        for job in rng.permutation(len(jobs)).tolist():
            part, index = jobs[job]
            one_round[part, index] = parts[part].model.seconds(microbatches[index])
            done += 1
            progress(done, rounds.size)
    return np.median(rounds[1:], axis=0)


def _add_up(parts: list[_Part], fits: list[NDArray[np.float64]], *, shape: ModelShape) -> dict[str, Any]:
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
