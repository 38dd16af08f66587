"""The global batches that `compare` plans: cut from a file of lengths or a draw, or the steps of a record.

Invariant: batches are in the order of training; samples keep the rank that loaded them, where that is known.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError
from megatron_balance.lengths import read_lengths, synthetic_lengths
from megatron_balance.record import RunRecord

SYNTHETIC_STEPS = 10
"""Global batches drawn for `synthetic:NAME` when neither N nor --steps is given."""


@dataclass(frozen=True, eq=False)
class GlobalBatch:
    """The samples of one step.

    Attributes:
        segment_lengths: `[sum(num_segments)]` int64 original tokens of each sequence.
        num_segments: `[num_samples]` int64 sequences of each sample.
        home_ranks: `[num_samples]` int64 rank that loads each sample.
    """

    segment_lengths: NDArray[np.int64]
    _: KW_ONLY
    num_segments: NDArray[np.int64]
    home_ranks: NDArray[np.int64]


def lengths_of(source: str, *, key: str | None, shuffle: int | None, most: int) -> NDArray[np.int64]:
    """All lengths of LENGTHS, in the order of training.

    Args:
        source: a file, or `synthetic:NAME[:N[:SEED]]`.
        key: `--key`.
        shuffle: seed of `--shuffle`; None for the order of the file.
        most: samples drawn where `source` gives no N.
    """
    if not source.startswith("synthetic:"):
        lengths = read_lengths(source, key=key)
    else:
        _, name, *numbers = source.split(":")
        if len(numbers) > 2 or not all(number.isdecimal() for number in numbers):
            raise BalanceError(f"LENGTHS is {source!r}: it must be synthetic:NAME, :NAME:N or :NAME:N:SEED.")
        if key is not None:
            raise BalanceError(f"--key is {key!r} and LENGTHS is {source!r}, which has no columns: drop --key.")
        num_samples = int(numbers[0]) if numbers else most
        lengths = synthetic_lengths(name, num_samples=num_samples, seed=int(numbers[1]) if len(numbers) == 2 else 0)
    if shuffle is not None:
        lengths = lengths[np.random.default_rng(shuffle).permutation(lengths.size)]
    return lengths


def cut(lengths: NDArray[np.int64], *, global_batch_size: int, steps: int | None, dp_size: int) -> list[GlobalBatch]:
    """Global batches in order; an incomplete last one is left out, as Megatron's sampler does."""
    num_full = lengths.size // global_batch_size
    if num_full < (steps or 1):
        raise BalanceError(
            f"--global-batch-size {global_batch_size} and --steps {steps or 1} need "
            f"{(steps or 1) * global_batch_size} lengths, but there are {lengths.size}: lower one of them."
        )
    one_each = np.ones(global_batch_size, dtype=np.int64)
    return [
        GlobalBatch(
            lengths[step * global_batch_size :][:global_batch_size],
            num_segments=one_each,
            home_ranks=_dealt(global_batch_size, dp_size=dp_size),
        )
        for step in range(num_full if steps is None else steps)
    ]


def recorded_batches(record: RunRecord, *, dp_size: int) -> list[GlobalBatch]:
    """The steps of a run as it loaded them; for another number of ranks samples go to ranks in turn."""
    kept = record.info.topology.dp_size == dp_size
    return [
        GlobalBatch(
            step.segment_lengths,
            num_segments=step.num_segments,
            # Home ranks that were not recorded are zeros.
            home_ranks=step.home_ranks
            if kept and step.home_ranks.any()
            else _dealt(step.num_segments.size, dp_size=dp_size),
        )
        for step in record.steps
        if step.segment_lengths.size
    ]


def _dealt(num_samples: int, *, dp_size: int) -> NDArray[np.int64]:
    """The rank that loads each sample: Megatron's sampler deals them out one by one."""
    return np.arange(num_samples, dtype=np.int64) % dp_size
