"""Makes the global batches that a command plans, from lengths or from a recorded run.

Invariant: batches are in the order of training; samples keep the rank that loaded them, where that is known.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cli.progress import progress_bar
from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.lengths.read import read_lengths, synthetic_lengths
from megatron_balance.lengths.text import count_text_tokens
from megatron_balance.planner.selection.lookahead import LookAhead
from megatron_balance.record.run_record import RunRecord
from megatron_balance.record.step import StepRecord
from megatron_balance.topology import Topology

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


def read_flagged_lengths(args: argparse.Namespace, *, global_batch_size: int) -> NDArray[np.int64]:
    """Lengths from a file, counted in text or drawn, by the flags: `[num_samples]` int64, tokens."""
    if args.seed < 0:
        raise BalanceError(f"--seed is {args.seed}: it must be 0 or more.")
    source: str = args.lengths
    if source.startswith("synthetic:"):
        _, name, *counts = source.split(":")
        if len(counts) > 1 or not all(count.isdecimal() for count in counts):
            raise BalanceError(f"LENGTHS is {source!r}: it must be synthetic:NAME or synthetic:NAME:N.")
        num_samples = int(counts[0]) if counts else (args.steps or SYNTHETIC_STEPS) * global_batch_size
        lengths = synthetic_lengths(name, num_samples=num_samples, seed=args.seed)
    elif args.tokenizer is not None:
        with progress_bar("counting tokens") as progress:
            lengths = count_text_tokens(
                source,
                tokenizer=args.tokenizer,
                key=args.text_key,
                tokens_per_message=args.tokens_per_message,
                progress=progress,
            )
    else:
        lengths = read_lengths(source, key=args.key)
    if args.shuffle:
        lengths = np.random.default_rng(args.seed).permutation(lengths)
    return lengths


def check_counts(global_batch_size: int, *, steps: int | None) -> None:
    """Raises where a count is below 1."""
    if global_batch_size < 1:
        raise BalanceError(f"--global-batch-size is {global_batch_size}: it must be at least 1.")
    if steps is not None and steps < 1:
        raise BalanceError(f"--steps is {steps}: it must be at least 1.")


def cut(lengths: NDArray[np.int64], *, global_batch_size: int, steps: int | None, max_steps: int) -> list[GlobalBatch]:
    """The first global batches, in order; an incomplete last one is left out, as Megatron's sampler does.

    Args:
        lengths: `[num_samples]` tokens.
        global_batch_size: samples a step.
        steps: number of steps; None for all full batches, at most `max_steps`.
        max_steps: limit if `steps` is None.
    """
    num_full = lengths.size // global_batch_size
    num_steps = min(num_full, max_steps) if steps is None else steps
    if num_steps > num_full or num_full == 0:
        raise BalanceError(
            f"--global-batch-size {global_batch_size} and --steps {max(num_steps, 1)} need "
            f"{max(num_steps, 1) * global_batch_size} lengths, but there are {lengths.size}: lower one of them."
        )
    return [
        GlobalBatch(lengths[step * global_batch_size : (step + 1) * global_batch_size]) for step in range(num_steps)
    ]


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


def look_ahead(
    batches: Sequence[GlobalBatch], *, window: int, cost_model: CostModel, topology: Topology
) -> list[GlobalBatch]:
    """The same samples, each step's chosen from several global batches, as `--balance-lookahead` does.

    Args:
        batches: all of one size.
        window: global batches to choose from.
        cost_model: cost of a sample.
        topology: the ranks.
    """
    pool = LookAhead(window, batch_size=batches[0].num_samples, dp_size=topology.dp_size)
    segments = np.concatenate([batch.segment_lengths for batch in batches])
    counts = np.concatenate([batch.segments_of_samples for batch in batches])
    homes = np.concatenate([batch.home_ranks(topology.dp_size) for batch in batches])
    ends = np.cumsum(counts)
    costs = _costs(segments, ends=ends, cost_model=cost_model, topology=topology)
    num_pushed = 0
    chosen: list[GlobalBatch] = []
    while len(chosen) < len(batches):
        # No more than the window: every choice goes through the whole pool.
        num_pushed = pool.push(costs[num_pushed : num_pushed + pool.num_missing]).stop
        if num_pushed == len(costs):
            pool.drain()
        arrivals = pool.pop()
        # In the order of gathering: by home rank, then by arrival.
        arrivals = arrivals[np.argsort(homes[arrivals], kind="stable")]
        chosen.append(_of_samples(arrivals, segments=segments, counts=counts, ends=ends, homes=homes))
    return chosen


def _costs(
    segments: NDArray[np.int64], *, ends: NDArray[np.int64], cost_model: CostModel, topology: Topology
) -> list[int]:
    """Exact cost of each sample, in Python's integers: a sum over its segments."""
    unique, inverse = np.unique(topology.padded_seq_len(segments), return_inverse=True)
    of_unique = [cost_model(length) for length in unique.tolist()]
    of_segments = [of_unique[index] for index in inverse.tolist()]
    if ends.size == len(of_segments):
        return of_segments
    return [sum(of_segments[start:end]) for start, end in zip([0, *ends.tolist()], ends.tolist(), strict=False)]


def _of_samples(
    samples: NDArray[np.int64],
    *,
    segments: NDArray[np.int64],
    counts: NDArray[np.int64],
    ends: NDArray[np.int64],
    homes: NDArray[np.int64],
) -> GlobalBatch:
    whole = segments.size == counts.size
    lengths = segments[samples] if whole else np.concatenate([segments[ends[s] - counts[s] : ends[s]] for s in samples])
    return GlobalBatch(lengths, num_segments=None if whole else counts[samples], loaded_by=homes[samples])


def is_record(source: str) -> bool:
    """True if LENGTHS is the folder of a recorded run."""
    return Path(source).is_dir()
