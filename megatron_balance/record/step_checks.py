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
    """Check every field.

    Args:
        step: read from a file.
        topology: of the run.

    Raises:
        ValueError: names the impossible field.
    """
    num_samples = step.slot_of.size
    num_ranks = topology.num_leaves if topology.dynamic_cp else topology.dp_size
    num_slots = num_ranks * step.num_microbatches
    if step.num_microbatches < 1 or step.cost_grid.shape != (num_ranks, step.num_microbatches):
        raise ValueError(
            f"step {step.iteration} has costs of shape {step.cost_grid.shape}: the run has {num_ranks} "
            f"{'leaves' if topology.dynamic_cp else 'data-parallel ranks'}, the step {step.num_microbatches} "
            "micro-batches"
        )
    _check(step.slot_of, name="slot_of", size=num_samples, below=num_slots)
    _check(step.home_ranks, name="home_ranks", size=num_samples, below=topology.dp_size)
    _check(step.num_segments, name="num_segments", size=num_samples, below=step.segment_lengths.size + 1)
    _check(
        step.segment_lengths, name="segment_lengths", size=int(step.num_segments.sum(dtype=np.int64)), below=_MAX_TOKENS
    )
    _check(step.cost_grid.ravel(), name="cost_grid", size=num_slots, below=2**62)
    if (step.cp_sizes is not None) != topology.dynamic_cp:
        raise ValueError(f"step {step.iteration} has {'no ' if step.cp_sizes is None else ''}cp_sizes")
    if step.cp_sizes is not None:
        check_cp_sizes(step.cp_sizes, slot_of=step.slot_of, shape=step.cost_grid.shape, topology=topology)
    if not 0 <= step.cost_shift <= _MAX_COST_SHIFT:
        raise ValueError(f"cost_shift is {step.cost_shift}")
    for name in ("plan_seconds", "exchange_seconds", "exposed_seconds"):
        if not 0 <= getattr(step, name) < float("inf"):
            raise ValueError(f"{name} is {getattr(step, name)}")


def check_cp_sizes(
    sizes: NDArray[Any], *, slot_of: NDArray[np.int64], shape: tuple[int, ...], topology: Topology
) -> None:
    """Each group is whole: aligned leaves that share a slot; no leaf lacks a slot before its last.

    Args:
        sizes: `StepRecord.cp_sizes`.
        slot_of: of the step.
        shape: `(num_leaves, num_microbatches)`.
        topology: of the run.

    Raises:
        ValueError: says what is impossible.
    """
    if sizes.dtype != np.int64 or sizes.shape != shape:
        raise ValueError(f"cp_sizes is {sizes.dtype} of shape {sizes.shape}; it must be int64 of shape {shape}")
    there = sizes > 0
    if not np.isin(sizes, (0, *topology.dynamic_cp_sizes)).all() or (there[:, 1:] > there[:, :-1]).any():
        raise ValueError(f"cp_sizes has a size that is none of {topology.dynamic_cp_sizes}, or a gap")
    for size in topology.dynamic_cp_sizes:
        held = sizes == size
        of_nodes = held[: len(sizes) // size * size].reshape(-1, size, shape[1])
        if size * of_nodes.all(axis=1).sum() != held.sum():
            raise ValueError(f"cp_sizes has a group of {size} leaves that is not whole")
    first_leaves, of_samples = slot_of // shape[1], sizes.ravel()[slot_of]
    if not of_samples.all() or (first_leaves % of_samples).any():
        raise ValueError("slot_of has a sample that is not on the first leaf of a group")


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
