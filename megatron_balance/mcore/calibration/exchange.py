"""Measures what context-parallel ranks take to exchange keys and values, over the ranks that torchrun started.

Layers run over micro-batches that 2, 4, … ranks share. With c ranks and the seconds that were fitted on one rank,

    seconds = per_microbatch + per_sequence*n + (linear*ΣL + quadratic*ΣL²) / c  +  cp_exchange * ΣL * (c-1)/c

so that only `cp_exchange` is fitted: everything that a shared micro-batch takes beyond its part of the computing. A
ring that computes while it receives shows what it does not hide. Sizes that stay within a node give one value, larger
ones another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cost.fitting import fit_seconds, relative_errors
from megatron_balance.mcore.calibration.microbatches import SHORTEST, Lengths, mixed_microbatches
from megatron_balance.mcore.calibration.parts import Part, layer_parts
from megatron_balance.mcore.calibration.timed_model import set_cp_size
from megatron_balance.model.shape import ModelShape

NUM_HELD_OUT = 4
"""Micro-batches of mixed lengths that judge the fit, of each size."""


@dataclass(frozen=True)
class SharedLayers:
    """Layers at one context-parallel size.

    Attributes:
        cp_size: ranks that share a micro-batch.
        parts: kinds of layers.
        fitted: micro-batches that are fitted.
        held_out: micro-batches that judge the fit.
    """

    cp_size: int
    parts: list[Part]
    fitted: list[Lengths]
    held_out: list[Lengths]

    @property
    def jobs(self) -> list[tuple[Part, Lengths]]:
        """All measurements, part by part."""
        return [(part, lengths) for part in self.parts for lengths in self.fitted + self.held_out]


def cp_sizes_of(num_ranks: int) -> list[int]:
    """Context-parallel sizes above 1 to measure on `num_ranks` ranks: powers of two that divide their number.

    Example:
        >>> cp_sizes_of(8), cp_sizes_of(6), cp_sizes_of(1)
        ([2, 4, 8], [2], [])
    """
    return [1 << power for power in range(1, num_ranks.bit_length()) if num_ranks % (1 << power) == 0]


def shared_layers(
    shape: ModelShape,
    *,
    num_ranks: int,
    max_tokens: int,
    num_layers: int,
    rng: np.random.Generator,
    options: dict[str, Any],
) -> list[SharedLayers]:
    """Build the layers at every size; none where the model has no attention.

    Args:
        shape: the model.
        num_ranks: of torchrun.
        max_tokens: of the largest micro-batch of one rank.
        num_layers: layers of a kind that run together.
        rng: of mixed lengths.
        options: of TimedModel.
    """
    runs: list[SharedLayers] = []
    for cp_size in cp_sizes_of(num_ranks):
        set_cp_size(cp_size)
        parts = layer_parts(shape, num_layers=num_layers, options=options, cp_size=cp_size)
        mixed = mixed_microbatches(max_tokens * cp_size, rng=rng, num=NUM_HELD_OUT)
        held_out = [_divisible(lengths, cp_size=cp_size) for lengths in mixed]
        runs.append(SharedLayers(cp_size, parts, shared_grid(max_tokens, cp_size=cp_size), held_out))
    return [run for run in runs if run.parts]


def shared_grid(max_tokens: int, *, cp_size: int) -> list[Lengths]:
    """Micro-batches of one length each: lengths by powers of four from the longest, full and a quarter full.

    Args:
        max_tokens: of one rank.
        cp_size: ranks that share a micro-batch.
    """
    grid: list[Lengths] = []
    multiple, most = 2 * cp_size, max_tokens * cp_size
    length = most // multiple * multiple
    while length >= max(SHORTEST, multiple):
        grid += [(length,) * count for count in sorted({max(most // length // 4, 1), most // length})]
        length = length // 4 // multiple * multiple
    return grid


@dataclass(frozen=True)
class ExchangeFit:
    """The exchange between the ranks of one node, or of several.

    Attributes:
        seconds: per token received.
        origin: the measurements and the error of the fit, for calibration.json.
    """

    seconds: float
    origin: dict[str, Any]


def fit_exchange(
    runs: Sequence[SharedLayers], *, seconds: NDArray[np.float64], fits: dict[str, NDArray[np.float64]]
) -> ExchangeFit | None:
    """Fit what these sizes take beyond their part of the computing; None without sizes.

    Args:
        runs: the sizes.
        seconds: `[num_jobs]` of their jobs, one after another.
        fits: `[4]` seconds of each part's features on one rank, by name.
    """
    rows: list[_Row] = []
    start = 0
    for run in runs:
        microbatches = run.fitted + run.held_out
        end = start + len(run.jobs)
        times = np.array([part.times for part in run.parts])
        measured = times @ seconds[start:end].reshape(len(run.parts), -1)
        computing = times @ np.stack([part.features(microbatches) @ fits[part.name] for part in run.parts])
        start = end
        rows += [
            _Row(run.cp_size, lengths, one, alone, index >= len(run.fitted))
            for index, (lengths, one, alone) in enumerate(
                zip(microbatches, measured.tolist(), computing.tolist(), strict=True)
            )
        ]
    if not rows:
        return None
    fitted, held_out = ([row for row in rows if row.held_out is kept] for kept in (False, True))
    known = np.array([row.computing for row in fitted])
    received = np.array([[row.received] for row in fitted])
    [exchange] = fit_seconds(received, seconds=np.array([row.seconds for row in fitted]), known=known).tolist()
    return ExchangeFit(
        exchange,
        {
            "cp_sizes": [run.cp_size for run in runs],
            "held_out_error": _error(held_out, exchange=exchange),
            "held_out_error_without": _error(held_out, exchange=0.0),
            "measurements": [
                {
                    "cp_size": row.cp_size,
                    "lengths": list(row.lengths),
                    "seconds": row.seconds,
                    "predicted": row.computing + exchange * row.received,
                    "held_out": row.held_out,
                }
                for row in rows
            ],
        },
    )


@dataclass(frozen=True)
class _Row:
    """A micro-batch that was measured: its ranks, sequences, seconds of the layers, those of the computing alone."""

    cp_size: int
    lengths: Lengths
    seconds: float
    computing: float
    held_out: bool

    @property
    def received(self) -> float:
        """Tokens whose keys and values a rank receives."""
        return sum(self.lengths) * (self.cp_size - 1) / self.cp_size


def _error(rows: Sequence[_Row], *, exchange: float) -> float:
    """Median relative error."""
    features = np.array([[row.computing, row.received] for row in rows])
    seconds = np.array([row.seconds for row in rows])
    return float(np.median(relative_errors(features, seconds=seconds, coefficients=np.array([1.0, exchange]))))


def _divisible(lengths: Lengths, *, cp_size: int) -> Lengths:
    """Lengths padded to two chunks a rank."""
    return tuple(-(-length // (2 * cp_size)) * 2 * cp_size for length in lengths)
