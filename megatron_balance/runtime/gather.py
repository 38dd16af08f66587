"""Gathers the lengths of all samples on every rank, and checks that all ranks can continue.

A rank must not raise an error in its own data alone: its peers would wait for ever. So the error is sent in the header,
and every rank raises it. Ranks that gather for different steps are detected here too.

The values of a rank are the lengths of its samples. Where any of them has several sequences, they are the number of
sequences of each sample and then the lengths of all sequences: more values than samples, which distinguishes the two.
Where samples have ragged keys, the entries of each of these keys follow, and where images count, the sums of their
patches, sample after sample.

Collectives: one all_gather of a row of `HEADER_FIELDS + row_values` int64 a rank (1 KiB by default). A second one
carries the other values where some rank has more. One more carries schemas or error texts, where some rank has no
samples or is at fault. All ranks decide on these from the same header.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray

from megatron_balance.errors import BalanceError
from megatron_balance.model.vision import patches_of_grids
from megatron_balance.runtime.comm import all_gather_bytes, all_gather_row, ranks_by_value
from megatron_balance.runtime.failure import cannot_go_on
from megatron_balance.samples.sample import Sample, SampleSchema

FAILED, FINGERPRINT, STEP, NEW_SOURCE, SCHEMA_HASH, DETAIL_NBYTES, NUM_SAMPLES, NUM_VALUES, REPORTED = range(9)
NUM_REPORTED = 4
"""Numbers of a rank that travel along and decide nothing: memory of its device (3) and the time of a step."""

HEADER_FIELDS = REPORTED + NUM_REPORTED
ROW_MULTIPLE = 64  # int64: 512 bytes
INLINE_LENGTHS = 2 * ROW_MULTIPLE - HEADER_FIELDS
"""Values of a rank that the first gather of a run has room for: with its header they fill 1 KiB."""

NO_SCHEMA = -1  # hashes are not negative

GRID_KEYS = ("image_grid_thw", "video_grid_thw")
PIXEL_KEYS = ("pixel_values", "images", "imgs")


@dataclass(frozen=True)
class Header:
    """What a rank sends with its lengths in a run of steps.

    Attributes:
        fingerprint: a hash of flags and versions, in [0, 2**63), that must be equal on all ranks.
        step: that the samples are for, counted by the caller; equal on all ranks.
        new_source: whether they come from another source than this rank's last ones.
        reported: `[NUM_REPORTED]` numbers for the other ranks.
        row_values: values that a rank sends before it knows those of the others. Equal on all ranks: the default, or
            `next_row_values` of the last gather that all of them completed.
    """

    fingerprint: int = 0
    step: int = 0
    new_source: bool = False
    reported: Sequence[int] = (0,) * NUM_REPORTED
    row_values: int = INLINE_LENGTHS


class OutOfStepError(BalanceError):
    """Ranks make different steps at the same time, and would never meet again."""


@dataclass(frozen=True, eq=False)
class GatheredLengths:
    """The samples of all ranks; a sample's id is its index here.

    Attributes:
        lengths: int64 `[num_samples]`, tokens (`original_seq_len`), in the order (rank, local index).
        home_ranks: int64 `[num_samples]`, the rank in the group that loaded the sample.
        num_samples_per_rank: int64 `[dp_size]`.
        offset: id of this rank's first sample.
        schema: of all samples; None where no rank has any.
        num_segments: int64 `[num_samples]`, sequences of each sample, at least 1.
        segment_lengths: int64 `[sum of num_segments]`, tokens of each sequence, sample after sample.
        new_source: True if some rank's samples come from another source than its last ones.
        next_row_values: `row_values` for a next gather of about as many samples; the same on every rank.
        reported: int64 `[dp_size, NUM_REPORTED]`, the numbers that each rank sent along.
        ragged_lengths: int64 `[num_samples, num_ragged]`, entries of each ragged key, in the schema's order.
        image_patches: int64 `[num_samples, 2]`, as `image_patches` counts them; None where no rank did.
    """

    lengths: NDArray[np.int64]
    home_ranks: NDArray[np.int64]
    num_samples_per_rank: NDArray[np.int64]
    offset: int
    schema: SampleSchema | None
    num_segments: NDArray[np.int64]
    segment_lengths: NDArray[np.int64]
    new_source: bool
    next_row_values: int
    reported: NDArray[np.int64]
    ragged_lengths: NDArray[np.int64]
    image_patches: NDArray[np.int64] | None

    def segments_of(self, sample_ids: NDArray[np.int64]) -> list[tuple[int, ...]]:
        """Lengths of the sequences of each of these samples."""
        if self.segment_lengths.size == self.lengths.size:
            return [(length,) for length in self.lengths[sample_ids].tolist()]
        stops = np.cumsum(self.num_segments)[sample_ids]
        starts = stops - self.num_segments[sample_ids]
        return [tuple(self.segment_lengths[start:stop].tolist()) for start, stop in zip(starts, stops, strict=True)]


def gather_sample_lengths(
    samples: Sequence[Sample],
    *,
    group: dist.ProcessGroup,
    problem: str | None = None,
    patch_values: int | None = None,
    header: Header = Header(),
    device: torch.device | str = "cpu",
) -> GatheredLengths:
    """Gather the lengths of all ranks' samples, and check that the ranks agree.

    Args:
        samples: of this rank; may be empty.
        group: the data-parallel ranks (without context parallelism: those that load different samples).
        problem: an error in this rank's data. It is raised here, on every rank.
        patch_values: that of `image_patches`, which counts patches on every rank; None on every rank for no count.
        header: of this rank, in a run of steps.
        device: where the collective's buffers live: `cuda` for NCCL.

    Raises:
        BalanceError: on every rank, naming the ranks: a problem on some rank, samples that differ on one rank or
            between ranks, different fingerprints.
        OutOfStepError: on every rank: different steps.
    """
    schema = None
    patches = None if patch_values is None else np.zeros((0, 2), dtype=np.int64)
    try:
        schema = SampleSchema.shared_by(samples)
        if patch_values is not None:
            patches = image_patches(samples, patch_values=patch_values)
    except BalanceError as error:
        problem = problem or str(error)
    return gather_lengths(
        [length for sample in samples for length in sample.segment_lengths],
        num_segments=[len(sample.segment_lengths) for sample in samples],
        ragged_lengths=[sample.ragged_lengths for sample in samples],
        group=group,
        schema=schema,
        problem=problem,
        image_patches=patches,
        header=header,
        device=device,
    )


def gather_lengths(
    local_lengths: ArrayLike,
    *,
    group: dist.ProcessGroup,
    num_segments: ArrayLike | None = None,
    ragged_lengths: Sequence[Sequence[int]] = (),
    schema: SampleSchema | None = None,
    problem: str | None = None,
    image_patches: NDArray[np.int64] | None = None,
    header: Header = Header(),
    device: torch.device | str = "cpu",
) -> GatheredLengths:
    """`gather_sample_lengths` without samples.

    Args:
        local_lengths: `[num_local_samples]`, tokens, or one entry a sequence, sample after sample; may be empty.
        group: as above.
        num_segments: `[num_local_samples]`, sequences of each sample, at least 1; None where each is one sequence.
        ragged_lengths: `[num_local_samples, num_ragged]`, entries of each of the schema's ragged keys.
        schema: of this rank's samples; None only where it has none, and then the others' is adopted.
        problem: as above.
        image_patches: `[num_local_samples, 2]`, as `image_patches` counts them; None on every rank or on none.
        header: as above.
        device: as above.
    """
    lengths = np.asarray(local_lengths, dtype=np.int64).reshape(-1)
    counts = np.ones_like(lengths) if num_segments is None else np.asarray(num_segments, dtype=np.int64).reshape(-1)
    num_ragged = 0 if schema is None else schema.num_ragged
    values = lengths[:0]
    if problem is None:
        columns = [np.array(ragged_lengths, dtype=np.int64).reshape(len(counts), num_ragged)]
        columns += [] if image_patches is None else [image_patches]
        several = len(lengths) != len(counts)
        values = np.concatenate([counts[: several * len(counts)], lengths, np.hstack(columns).ravel()])

    detail = problem.encode() if problem is not None else b"" if schema is None else schema.to_bytes()
    room = header.row_values
    row = np.zeros(HEADER_FIELDS + room, dtype=np.int64)
    row[[FAILED, NEW_SOURCE]] = problem is not None, header.new_source
    row[[FINGERPRINT, STEP]] = header.fingerprint, header.step
    row[SCHEMA_HASH] = NO_SCHEMA if schema is None else schema.hash()
    row[[DETAIL_NBYTES, NUM_SAMPLES, NUM_VALUES]] = len(detail), len(counts) * (problem is None), len(values)
    row[REPORTED:HEADER_FIELDS] = header.reported
    row[HEADER_FIELDS : HEADER_FIELDS + len(values)] = values[:room]
    headers = all_gather_row(row, group=group, device=device, what="the lengths of all ranks' samples (gather)")

    if len({*headers[:, FINGERPRINT].tolist()}) > 1:
        seen = _seen([f"{value:#x}" for value in headers[:, FINGERPRINT].tolist()], group=group)
        raise BalanceError(
            f"Ranks were started with different balance settings or versions (fingerprints {seen}): "
            "give every rank the same command line and the same installation."
        )
    if len({*headers[:, STEP].tolist()}) > 1:
        raise OutOfStepError(
            "Ranks make different steps of this run at the same time, counted from 0: "
            f"{_seen(headers[:, STEP].tolist(), group=group)}. To some of them came "
            "another iterator than the one that their next step was prepared from, and not to all. Pass a new iterator "
            "on every rank or on none, or set --no-balance-overlap."
        )
    failed, hashes = headers[:, FAILED] != 0, headers[:, SCHEMA_HASH]
    if failed.any() or len({*hashes.tolist()}) > 1:
        what = "the schemas or errors of all ranks (gather)"
        details = all_gather_bytes(detail, sizes=headers[:, DETAIL_NBYTES], group=group, device=device, what=what)
        if failed.any():
            raise cannot_go_on(failed, texts=details, group=group)
        schema = _agreed_schema(details, group=group)

    num_values, num_samples = headers[:, NUM_VALUES], headers[:, NUM_SAMPLES]
    padded = headers[:, HEADER_FIELDS:]
    most = int(num_values.max())
    if most > room:
        rest = np.zeros(most - room, dtype=np.int64)
        rest[: max(len(values) - room, 0)] = values[room:]
        more = all_gather_row(rest, group=group, device=device, what="the remaining lengths (gather)")
        padded = np.concatenate([padded, more], axis=1)

    num_ragged = 0 if schema is None else schema.num_ragged
    num_columns = num_ragged + (0 if image_patches is None else 2)
    all_counts, all_lengths, beside = zip(
        *(
            _read(row[:stop], num_samples=num, num_columns=num_columns)
            for row, stop, num in zip(padded, num_values.tolist(), num_samples.tolist(), strict=True)
        ),
        strict=True,
    )
    segments, segment_lengths, table = map(np.concatenate, (all_counts, all_lengths, beside))
    starts = np.cumsum(segments) - segments
    # Room for a quarter more than the rank with the most values has: from step to step numbers rarely vary by more.
    next_row = -(-(HEADER_FIELDS + most * 5 // 4) // ROW_MULTIPLE) * ROW_MULTIPLE
    return GatheredLengths(
        lengths=np.add.reduceat(segment_lengths, starts) if len(starts) else segment_lengths,
        home_ranks=np.repeat(np.arange(group.size(), dtype=np.int64), num_samples),
        num_samples_per_rank=num_samples,
        offset=int(num_samples[: group.rank()].sum()),
        schema=schema,
        num_segments=segments,
        segment_lengths=segment_lengths,
        new_source=bool(headers[:, NEW_SOURCE].any()),
        reported=headers[:, REPORTED:HEADER_FIELDS],
        next_row_values=max(INLINE_LENGTHS, next_row - HEADER_FIELDS),
        ragged_lengths=table[:, :num_ragged],
        image_patches=None if image_patches is None else table[:, num_ragged:],
    )


def _read(
    values: NDArray[np.int64], *, num_samples: int, num_columns: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Of one rank: sequences of each sample, lengths of all sequences, and `[num_samples, num_columns]` beside them."""
    end = len(values) - num_samples * num_columns
    start = num_samples if end > num_samples else 0
    lengths = values[start:end]
    return values[:start] if start else np.ones_like(lengths), lengths, values[end:].reshape(num_samples, num_columns)


def _agreed_schema(details: Sequence[bytes], *, group: dist.ProcessGroup) -> SampleSchema:
    """The one schema of the ranks that have one; raises where there are two."""
    (first, first_ranks), *others = (
        (SampleSchema.from_bytes(detail), ranks)
        for detail, ranks in ranks_by_value(details, group=group).items()
        if detail
    )
    phrases = [f"on {ranks} " + ", ".join(schema.differences(first)) for schema, ranks in others]
    if phrases:
        raise BalanceError(f"Samples differ from those of {first_ranks}: " + "; ".join(phrases[:8]) + ".")
    return first


def _seen(values: Sequence[int | str], *, group: dist.ProcessGroup) -> str:
    """Each value and the ranks that have it."""
    return "; ".join(f"{value} on {ranks}" for value, ranks in ranks_by_value(values, group=group).items())


def image_patches(samples: Sequence[Sample], *, patch_values: int) -> NDArray[np.int64]:
    """`[num_samples, 2]`: patches that a vision encoder runs for each sample, and the sum of each image's, squared.

    `image_grid_thw` and `video_grid_thw`, as processors of the Qwen-VL family make them, describe each image. Without
    such a key, each entry `[channels, height, width]` of the pixels is an image: a tile of one size, as in LLaVA, of
    patches of so many values; 0 where that is not known.
    """
    sums = np.zeros((len(samples), 2), dtype=np.int64)
    keys = SampleSchema.of(samples[0]).keys if samples else ()
    shapes = {key.name: key.shape for key in keys if key.kind == "ragged"}
    grids = [name for name in GRID_KEYS if name in shapes]
    for name in grids:
        for index, sample in enumerate(samples):
            patches = patches_of_grids(sample.ragged[name].numpy())
            sums[index] += patches.sum(), (patches**2).sum()
    for name in (name for name in PIXEL_KEYS if name in shapes and not grids):
        num_values = int(np.prod(shapes[name]))
        if len(shapes[name]) != 3 or not patch_values or num_values % patch_values:
            raise BalanceError(
                f"{name} has entries of shape {list(shapes[name])}: patches are counted from {' or '.join(GRID_KEYS)}, "
                "or from tiles [channels, height, width] of a multiple of VisionEncoder.patch_values numbers "
                f"({patch_values or 'not known: give cost as a ModelShape with an encoder'}). Give one of them, or "
                "plan by tokens: drop --balance-by-flops."
            )
        of_tile = num_values // patch_values
        num_tiles = np.array([len(sample.ragged[name]) for sample in samples], dtype=np.int64)
        sums += num_tiles[:, None] * np.array([of_tile, of_tile**2])
    return sums
