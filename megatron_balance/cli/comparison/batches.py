"""Makes the global batches that a command plans, from lengths or from a recorded run.

Invariant: batches are in the order of training; samples keep the rank that loaded them, where that is known.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cli.comparison.image_file import read_image_patches
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
        image_patches: `[num_samples]` patches of each image of a sample; None for no images.
    """

    segment_lengths: NDArray[np.int64]
    _: KW_ONLY
    num_segments: NDArray[np.int64] | None = None
    loaded_by: NDArray[np.int64] | None = None
    image_patches: Sequence[Sequence[int]] | None = None

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
    """All samples as one batch: lengths from a file, counted in text or drawn, by the flags; images from a file."""
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
    images = None if args.image_key is None else _read_images(args, num_samples=lengths.size)
    if args.shuffle:
        order = np.random.default_rng(args.seed).permutation(lengths.size)
        lengths = lengths[order]
        images = None if images is None else [images[sample] for sample in order.tolist()]
    return GlobalBatch(lengths, image_patches=images)


def _read_images(args: argparse.Namespace, *, num_samples: int) -> list[list[int]]:
    if args.lengths.startswith("synthetic:") or args.tokenizer is not None:
        raise BalanceError(
            "--image-key is given and LENGTHS is not a file of lengths: give a .jsonl or .parquet file that has both."
        )
    images = read_image_patches(args.lengths, key=args.image_key)
    assert len(images) == num_samples, "lengths and images are of the same lines"
    return images


def images_text(batches: Sequence[GlobalBatch]) -> str:
    """A sentence on the images of the batches; empty where they have none."""
    if batches[0].image_patches is None:
        return ""
    sizes = [size for batch in batches for patches in batch.image_patches or () for size in patches]
    mean = f", mean {sum(sizes) / len(sizes):.0f} patches" if sizes else ""
    return f"Images: {len(sizes)}{mean}. "


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
    lengths, images = samples.segment_lengths, samples.image_patches
    num_full = lengths.size // global_batch_size
    num_steps = min(num_full, max_steps) if steps is None else steps
    if num_steps > num_full or num_full == 0:
        raise BalanceError(
            f"--global-batch-size {global_batch_size} and --steps {max(num_steps, 1)} need "
            f"{max(num_steps, 1) * global_batch_size} lengths, but there are {lengths.size}: lower one of them."
        )
    of_steps = [slice(step * global_batch_size, (step + 1) * global_batch_size) for step in range(num_steps)]
    return [
        GlobalBatch(lengths[of_step], image_patches=None if images is None else images[of_step]) for of_step in of_steps
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
    images: list[Sequence[int]] | None = None
    if all(batch.image_patches is not None for batch in batches):
        images = [patches for batch in batches for patches in batch.image_patches or ()]
        costs = [cost + sum(map(cost_model.image_cost, patches)) for cost, patches in zip(costs, images, strict=True)]
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
        batch = _of_samples(arrivals, segments=segments, counts=counts, ends=ends, homes=homes)
        if images is not None:
            batch = replace(batch, image_patches=[images[sample] for sample in arrivals.tolist()])
        chosen.append(batch)
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
