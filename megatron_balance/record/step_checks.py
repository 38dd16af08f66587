"""Checks that a step read from a file is possible.

Invariant: a step that passes can be judged and drawn: every index in it is one of an array in it, and every size is
that of an array that the file holds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.record.step import StepRecord
from megatron_balance.topology import Topology

_MAX_TOKENS = 2**40
_MAX_COST_SHIFT = 1024


def check_step(step: StepRecord, *, topology: Topology) -> None:
    """Look at every field.

    Args:
        step: as it was read.
        topology: of the run.

    Raises:
        ValueError: says which field is impossible.
    """
    num_samples = step.slot_of.size
    num_slots = topology.dp_size * step.num_microbatches
    if step.num_microbatches < 1 or step.cost_grid.shape != (topology.dp_size, step.num_microbatches):
        raise ValueError(
            f"step {step.iteration} has costs of shape {step.cost_grid.shape}: the run has {topology.dp_size} "
            f"data-parallel ranks, the step {step.num_microbatches} micro-batches"
        )
    _check(step.slot_of, name="slot_of", size=num_samples, below=num_slots)
    _check(step.home_ranks, name="home_ranks", size=num_samples, below=topology.dp_size)
    _check(step.num_segments, name="num_segments", size=num_samples, below=step.segment_lengths.size + 1)
    _check(
        step.segment_lengths, name="segment_lengths", size=int(step.num_segments.sum(dtype=np.int64)), below=_MAX_TOKENS
    )
    _check(step.cost_grid.ravel(), name="cost_grid", size=num_slots, below=2**62)
    if not 0 <= step.cost_shift <= _MAX_COST_SHIFT:
        raise ValueError(f"cost_shift is {step.cost_shift}")
    for name in ("plan_seconds", "exchange_seconds", "exposed_seconds"):
        if not 0 <= getattr(step, name) < float("inf"):
            raise ValueError(f"{name} is {getattr(step, name)}")


def cut(values: NDArray[Any], *, sizes: NDArray[Any]) -> list[NDArray[Any]]:
    """Splits arrays that were joined end to end.

    Args:
        values: `[sum(sizes)]`.
        sizes: of each, at least one.

    Raises:
        ValueError: they are not the sizes of these values.
    """
    if sizes.dtype != np.int64 or sizes.ndim != 1 or not sizes.size or sizes.min() < 0 or sizes.max() > values.size:
        raise ValueError(f"{values.size} values are cut by sizes that cannot be theirs")
    if sizes.sum() != values.size:
        raise ValueError(f"{values.size} values are cut by sizes that sum to {sizes.sum()}")
    return np.split(values, np.cumsum(sizes)[:-1])


def check_seconds(seconds: NDArray[Any]) -> None:
    """Check the measured seconds of one rank's micro-batches in one step.

    Raises:
        ValueError: they are not seconds, or NaN where none were measured.
    """
    if seconds.dtype.kind != "f" or seconds.ndim != 1 or not (np.isnan(seconds) | (seconds >= 0)).all():
        raise ValueError(f"seconds are {seconds.dtype} of shape {seconds.shape}, or below 0")
    if np.isinf(seconds).any():
        raise ValueError("seconds are infinite")


def _check(values: NDArray[Any], *, name: str, size: int, below: int) -> None:
    if values.dtype != np.int64 or values.shape != (size,):
        raise ValueError(f"{name} is {values.dtype} of shape {values.shape}; it must be int64 of shape {(size,)}")
    if size and not (values.min() >= 0 and values.max() < below):
        raise ValueError(f"{name} goes from {values.min()} to {values.max()}; it must be from 0 to {below - 1}")
