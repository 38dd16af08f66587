"""Makes the global batches that a command plans, from lengths or from a recorded run.

Invariant: batches are in the order of training; samples keep the rank that loaded them, where that is known.
"""

from __future__ import annotations

import argparse
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError
from megatron_balance.lengths.read import read_lengths, synthetic_lengths
from megatron_balance.record.run_record import RunRecord
from megatron_balance.record.step import StepRecord

SYNTHETIC_STEPS = 10
"""Global batches drawn for `synthetic:NAME` when neither N nor --steps is given."""


@dataclass(frozen=True, eq=False)
class GlobalBatch:
    """The samples of one step.

    Attributes:
        segment_lengths: `[sum(num_segments)]` int64 original tokens of each sequence.
        num_segments: `[num_samples]` int64 sequences of each sample; None where each is one.
        loaded_by: `[num_samples]` int64 rank that loaded each sample; None for Megatron's own sampler.
    """

    segment_lengths: NDArray[np.int64]
    _: KW_ONLY
    num_segments: NDArray[np.int64] | None = None
    loaded_by: NDArray[np.int64] | None = None

    @property
    def num_samples(self) -> int:
        """Samples of the batch."""
        return self.segment_lengths.size if self.num_segments is None else self.num_segments.size

    @property
    def segments_of_samples(self) -> NDArray[np.int64]:
        """`[num_samples]` sequences of each sample."""
        return np.ones(self.num_samples, dtype=np.int64) if self.num_segments is None else self.num_segments

    @property
    def num_tokens(self) -> int:
        """Original tokens of the batch."""
        return int(self.segment_lengths.sum())

    def home_ranks(self, dp_size: int) -> NDArray[np.int64]:
        """The rank that loads each sample, `[num_samples]`: Megatron's sampler deals them out one by one."""
        if self.loaded_by is not None:
            return self.loaded_by
        return np.arange(self.num_samples, dtype=np.int64) % dp_size


def read_flagged_samples(args: argparse.Namespace, *, global_batch_size: int) -> GlobalBatch:
    """All samples as one batch: lengths from a file, or drawn, by the flags."""
    if args.seed < 0:
        raise BalanceError(f"--seed is {args.seed}: it must be 0 or more.")
    source: str = args.lengths
    if source.startswith("synthetic:"):
        _, name, *counts = source.split(":")
        if len(counts) > 1 or not all(count.isdecimal() for count in counts):
            raise BalanceError(f"LENGTHS is {source!r}: it must be synthetic:NAME or synthetic:NAME:N.")
        num_samples = int(counts[0]) if counts else (args.steps or SYNTHETIC_STEPS) * global_batch_size
        lengths = synthetic_lengths(name, num_samples=num_samples, seed=args.seed)
    else:
        lengths = read_lengths(source, key=args.key)
    if args.shuffle:
        lengths = lengths[np.random.default_rng(args.seed).permutation(lengths.size)]
    return GlobalBatch(lengths)


def check_counts(global_batch_size: int, *, steps: int | None) -> None:
    """Raises where a count is below 1."""
    if global_batch_size < 1:
        raise BalanceError(f"--global-batch-size is {global_batch_size}: it must be at least 1.")
    if steps is not None and steps < 1:
        raise BalanceError(f"--steps is {steps}: it must be at least 1.")


def cut(samples: GlobalBatch, *, global_batch_size: int, steps: int | None, max_steps: int) -> list[GlobalBatch]:
    """The first global batches, in order; an incomplete last one is left out, as Megatron's sampler does.

    Args:
        samples: all of them, each of one sequence.
        global_batch_size: samples a step.
        steps: number of steps; None for all full batches, at most `max_steps`.
        max_steps: limit if `steps` is None.
    """
    lengths = samples.segment_lengths
    num_full = lengths.size // global_batch_size
    num_steps = min(num_full, max_steps) if steps is None else steps
    if num_steps > num_full or num_full == 0:
        raise BalanceError(
            f"--global-batch-size {global_batch_size} and --steps {max(num_steps, 1)} need "
            f"{max(num_steps, 1) * global_batch_size} lengths, but there are {lengths.size}: lower one of them."
        )
    of_steps = [slice(step * global_batch_size, (step + 1) * global_batch_size) for step in range(num_steps)]
    return [GlobalBatch(lengths[of_step]) for of_step in of_steps]


def recorded_batches(record: RunRecord, *, dp_size: int) -> list[GlobalBatch]:
    """The steps of a run as it loaded them.

    Args:
        record: the run.
        dp_size: ranks they are planned for; where the run had another number, samples go to ranks in turn.
    """
    kept = record.info.topology.dp_size == dp_size
    return [
        GlobalBatch(
            step.segment_lengths,
            num_segments=None if (step.num_segments == 1).all() else step.num_segments,
            # Home ranks that were not recorded are zeros.
            loaded_by=step.home_ranks if kept and step.home_ranks.any() else None,
        )
        for step in recorded_steps(record)
    ]


def recorded_steps(record: RunRecord) -> list[StepRecord]:
    """The steps of a run that had samples."""
    return [step for step in record.steps if step.segment_lengths.size]


def is_record(source: str) -> bool:
    """True if LENGTHS is the folder of a recorded run."""
    return Path(source).is_dir()
