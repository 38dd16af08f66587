"""Gathers the lengths of all samples on every rank, and checks that all ranks can continue.

A rank must not raise an error in its own data alone: its peers would wait for ever. So the error is sent in the header,
and every rank raises it. Ranks that gather for different steps are detected here too.

The values of a rank are the lengths of its samples. Where any of them has several sequences, they are the number of
sequences of each sample and then the lengths of all sequences: more values than samples, which distinguishes the two.
Where samples have ragged keys, the entries of each of these keys follow, and where images count, the sums of their
patches, sample after sample.

Collectives: one all_gather of a row of `HEADER_FIELDS + row_values` int64 a rank (1 KiB by default). A second one
carries the other values where some rank has more than `row_values`; a caller that gathers step after step avoids it by
passing each gather what the one before advises. One more carries schemas or error texts, where some rank has no samples
or is at fault. All ranks decide on these from the same header.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray

from megatron_balance.errors import BalanceError
from megatron_balance.runtime.collectives import all_gather_bytes, all_gather_row, ranks_where
from megatron_balance.runtime.failure import cannot_go_on, check_equal_digests
from megatron_balance.runtime.image_patches import image_patches
from megatron_balance.runtime.peers import MAX_RANKS_NAMED
from megatron_balance.samples.sample import Sample, SampleSchema

INLINE_LENGTHS = 115
"""Values of a rank that the first gather of a run has room for: with its header they fill 1 KiB."""


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
        ragged_lengths: int64 `[num_samples, num_ragged]`, entries of each ragged key, in the schema's order; None where
            it has none.
        image_patches: int64 `[num_samples, 2]`, as `image_patches` counts them; None where no rank did.
    """

    lengths: NDArray[np.int64]
    home_ranks: NDArray[np.int64]
    num_samples_per_rank: NDArray[np.int64]
    offset: int
    schema: SampleSchema | None
    num_segments: NDArray[np.int64]
    segment_lengths: NDArray[np.int64]
    new_source: bool = False
    next_row_values: int = INLINE_LENGTHS
    reported: NDArray[np.int64] | None = None
    ragged_lengths: NDArray[np.int64] | None = None
    image_patches: NDArray[np.int64] | None = None

    def ragged_of(self, sample_ids: NDArray[np.int64]) -> list[list[int]]:
        """Entries of the ragged keys of each of these samples; empty where there is no such key."""
        return [] if self.ragged_lengths is None else self.ragged_lengths[sample_ids].tolist()

    def segments_of(self, sample_ids: NDArray[np.int64]) -> list[tuple[int, ...]] | None:
        """Lengths of the sequences of each of these samples; None where every sample of all ranks is one sequence."""
        if self.segment_lengths.size == self.lengths.size:
            return None
        stops = np.cumsum(self.num_segments)[sample_ids]
        starts = stops - self.num_segments[sample_ids]
        return [tuple(self.segment_lengths[start:stop].tolist()) for start, stop in zip(starts, stops, strict=True)]


def read_values(
    padded: NDArray[np.int64], *, num_values: NDArray[np.int64], num_samples: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Values of all ranks `[group_size, n]` → number of sequences of each sample, and lengths of all sequences."""
    if (num_values == num_samples).all():
        flat = padded[np.arange(padded.shape[1]) < num_values[:, None]]
        return np.ones_like(flat), flat
    counts: list[NDArray[np.int64]] = []
    lengths: list[NDArray[np.int64]] = []
    for row, stop, num in zip(padded, num_values.tolist(), num_samples.tolist(), strict=True):
        several = stop > num
        counts.append(row[:num] if several else np.ones(num, dtype=np.int64))
        lengths.append(row[num if several else 0 : stop])
    return np.concatenate(counts), np.concatenate(lengths)


def read_columns(
    padded: NDArray[np.int64], *, num_values: NDArray[np.int64], num_samples: NDArray[np.int64], num_columns: int
) -> NDArray[np.int64]:
    """Values of all ranks → each sample's values beside lengths, `[num_samples, num_columns]`: a rank's last ones."""
    last = (num_samples * num_columns).tolist()
    parts = [row[stop - num : stop] for row, stop, num in zip(padded, num_values.tolist(), last, strict=True)]
    return np.concatenate(parts).reshape(int(num_samples.sum()), num_columns)


NUM_SAMPLES, FINGERPRINT, SCHEMA_HASH, FAILED, DETAIL_NBYTES, NUM_VALUES, UNPACKED, STEP, NEW_SOURCE = range(9)
REPORTED = 9
NUM_REPORTED = 4
"""Numbers of a rank that travel along and decide nothing: memory of its device (3) and the time of a step."""

HEADER_FIELDS = REPORTED + NUM_REPORTED
ROW_MULTIPLE = 64  # int64: 512 bytes
NO_SCHEMA = -1  # hashes are not negative


class OutOfStepError(BalanceError):
    """Ranks make different steps at the same time, and would never meet again."""


def gather_sample_lengths(
    samples: Sequence[Sample],
    *,
    group: dist.ProcessGroup,
    fingerprint: int = 0,
    packed: bool = True,
    step: int = 0,
    new_source: bool = False,
    problem: str | None = None,
    row_values: int = INLINE_LENGTHS,
    reported: Sequence[int] = (0,) * NUM_REPORTED,
    patch_values: int | None = None,
    device: torch.device | str = "cpu",
) -> GatheredLengths:
    """`gather_lengths` of these samples; samples that differ among themselves raise on every rank.

    `patch_values` is that of `image_patches`, which counts patches on every rank; None on every rank for no count.
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
        ragged_lengths=[] if schema is None else [sample.ragged_lengths for sample in samples],
        group=group,
        schema=schema,
        fingerprint=fingerprint,
        packed=packed,
        step=step,
        new_source=new_source,
        problem=problem,
        row_values=row_values,
        reported=reported,
        image_patches=patches,
        device=device,
    )


def gather_lengths(
    local_lengths: ArrayLike,
    *,
    group: dist.ProcessGroup,
    num_segments: ArrayLike | None = None,
    ragged_lengths: ArrayLike = (),
    schema: SampleSchema | None = None,
    fingerprint: int = 0,
    packed: bool = True,
    step: int = 0,
    new_source: bool = False,
    problem: str | None = None,
    row_values: int = INLINE_LENGTHS,
    reported: Sequence[int] = (0,) * NUM_REPORTED,
    image_patches: NDArray[np.int64] | None = None,
    device: torch.device | str = "cpu",
) -> GatheredLengths:
    """Gather the lengths of all ranks, and check that the ranks agree.

    Args:
        local_lengths: `[num_local_samples]`, tokens, or one entry a sequence, sample after sample; may be empty.
        group: the data-parallel ranks (without context parallelism: those that load different samples).
        num_segments: `[num_local_samples]`, sequences of each sample, at least 1; None where each is one sequence.
        ragged_lengths: `[num_local_samples, num_ragged]`, entries of each of the schema's ragged keys.
        schema: of this rank's samples; None only where it has none, and then the others' is adopted.
        fingerprint: a hash of flags and versions, in [0, 2**63), that must be equal on all ranks.
        packed: whether this rank's data marks where its sequences begin (`cu_seqlens`); equal on all ranks.
        step: that the samples are for, counted by the caller; equal on all ranks.
        new_source: whether they come from another source than this rank's last ones.
        problem: an error in this rank's data. It is raised here, on every rank.
        row_values: values that a rank sends before it knows those of the others. Equal on all ranks: the default, or
            `next_row_values` of the last gather that all of them completed.
        reported: `[NUM_REPORTED]` numbers for the other ranks.
        image_patches: `[num_local_samples, 2]`, as `image_patches` counts them; None on every rank or on none.
        device: where the collective's buffers live: `cuda` for NCCL.

    Raises:
        BalanceError: on every rank, naming the ranks: a problem on some rank, different fingerprints, different
            schemas, packed data on some ranks only.
        OutOfStepError: on every rank: different steps.
    """
    lengths = np.asarray(local_lengths, dtype=np.int64).reshape(-1)
    counts = np.ones_like(lengths) if num_segments is None else np.asarray(num_segments, dtype=np.int64).reshape(-1)
    if problem is None:
        problem = _own_problem(lengths, counts=counts, num_entries=np.size(ragged_lengths), schema=schema)
    if problem is not None:
        lengths, counts = lengths[:0], counts[:0]
    columns = [] if image_patches is None else [image_patches[: len(counts)]]
    if len(counts) and np.size(ragged_lengths):
        columns.insert(0, np.asarray(ragged_lengths, dtype=np.int64).reshape(len(counts), -1))
    of_samples = np.concatenate(columns, axis=1).reshape(-1) if columns else lengths[:0]
    values = np.concatenate([*([] if len(lengths) == len(counts) else [counts]), lengths, of_samples])
    detail = b"" if schema is None else schema.to_bytes()
    if problem is not None:
        detail = problem.encode()

    header = np.zeros(HEADER_FIELDS + row_values, dtype=np.int64)
    header[NUM_SAMPLES] = len(counts)
    header[NUM_VALUES] = len(values)
    header[FINGERPRINT] = fingerprint
    header[SCHEMA_HASH] = NO_SCHEMA if schema is None else schema.hash()
    header[FAILED] = problem is not None
    header[DETAIL_NBYTES] = len(detail)
    header[UNPACKED] = not packed
    header[STEP] = step
    header[NEW_SOURCE] = new_source
    header[REPORTED:HEADER_FIELDS] = reported
    inline = values[:row_values]
    header[HEADER_FIELDS : HEADER_FIELDS + len(inline)] = inline
    headers = all_gather_row(header, group=group, device=device, what="the lengths of all ranks' samples (gather)")

    fingerprints = headers[:, FINGERPRINT]
    if (fingerprints != fingerprints[0]).any():
        seen = _seen(fingerprints, group=group, form="#x")
        raise BalanceError(
            f"Ranks were started with different balance settings or versions (fingerprints {seen}): "
            "give every rank the same command line and the same installation."
        )

    steps = headers[:, STEP]
    if (steps != steps[0]).any():
        raise OutOfStepError(
            "Ranks make different steps of this run at the same time, counted from 0: "
            f"{_seen(steps, group=group)}. To some of them came "
            "another iterator than the one that their next step was prepared from, and not to all. Pass a new iterator "
            "on every rank or on none, or set --no-balance-overlap."
        )

    failed = headers[:, FAILED] != 0
    hashes = headers[:, SCHEMA_HASH]
    if failed.any() or (hashes != hashes[0]).any():
        what = "the schemas or errors of all ranks (gather)"
        details = all_gather_bytes(detail, nbytes=headers[:, DETAIL_NBYTES], group=group, device=device, what=what)
        if failed.any():
            raise cannot_go_on(failed, texts=details, group=group)
        _check_equally_packed(headers[:, UNPACKED] != 0, group=group)
        schema = _agreed_schema(hashes, details, group=group)
    _check_equally_packed(headers[:, UNPACKED] != 0, group=group)

    num_values = headers[:, NUM_VALUES]
    num_more = int(num_values.max()) - row_values
    padded = headers[:, HEADER_FIELDS:]
    if num_more > 0:
        rest = np.zeros(num_more, dtype=np.int64)
        rest[: max(len(values) - row_values, 0)] = values[row_values:]
        more = all_gather_row(rest, group=group, device=device, what="the remaining lengths (gather)")
        padded = np.concatenate([padded, more], axis=1)
    num_samples_per_rank = headers[:, NUM_SAMPLES]
    num_ragged = 0 if schema is None else schema.num_ragged
    num_columns = num_ragged + (0 if image_patches is None else image_patches.shape[1])
    of_samples = read_columns(padded, num_values=num_values, num_samples=num_samples_per_rank, num_columns=num_columns)
    all_counts, segment_lengths = read_values(
        padded, num_values=num_values - num_samples_per_rank * num_columns, num_samples=num_samples_per_rank
    )
    starts = np.cumsum(all_counts) - all_counts
    return GatheredLengths(
        lengths=np.add.reduceat(segment_lengths, starts) if len(starts) else segment_lengths,
        home_ranks=np.repeat(np.arange(group.size(), dtype=np.int64), num_samples_per_rank),
        num_samples_per_rank=num_samples_per_rank,
        offset=int(num_samples_per_rank[: group.rank()].sum()),
        schema=schema,
        num_segments=all_counts,
        segment_lengths=segment_lengths,
        new_source=bool(headers[:, NEW_SOURCE].any()),
        reported=headers[:, REPORTED:HEADER_FIELDS],
        next_row_values=_row_values_for(int(num_values.max())),
        ragged_lengths=of_samples[:, :num_ragged] if num_ragged else None,
        image_patches=None if image_patches is None else of_samples[:, num_ragged:],
    )


def _row_values_for(num_values: int) -> int:
    """Room for a quarter more than the rank with the most values has; from step to step numbers rarely vary by more."""
    num_fields = HEADER_FIELDS + num_values * 5 // 4
    return max(INLINE_LENGTHS, -(-num_fields // ROW_MULTIPLE) * ROW_MULTIPLE - HEADER_FIELDS)


def check_same_schedule(digest: int, *, group: dist.ProcessGroup, device: torch.device | str = "cpu") -> None:
    """Check that all ranks computed the same schedule. One all_gather of one int64.

    Args:
        digest: a hash of the schedule, in [0, 2**63).
        group: the ranks that planned.
        device: where the collective's buffers live: `cuda` for NCCL.

    Raises:
        BalanceError: on every rank, naming the ranks that differ from the first.
    """
    row = np.array([digest], dtype=np.int64)
    check_equal_digests(
        all_gather_row(row, group=group, device=device, what="the plans of all ranks (compare)")[:, 0], group=group
    )


def _own_problem(
    lengths: NDArray[np.int64], *, counts: NDArray[np.int64], num_entries: int, schema: SampleSchema | None
) -> str | None:
    if (lengths < 0).any():
        return f"a sample's length is {lengths.min()}: it must be at least 0."
    if (counts < 1).any() or counts.sum() != len(lengths):
        return f"num_segments is {counts.tolist()}: it must be at least 1 and sum to the {len(lengths)} lengths given."
    if len(counts) and schema is None:
        return f"{len(counts)} samples and no schema: give the schema of the samples."
    if schema is not None and num_entries != len(counts) * schema.num_ragged:
        return (
            f"ragged_lengths has {num_entries} entries: it must have {schema.num_ragged}, one for each ragged key, for "
            f"each of {len(counts)} samples."
        )
    return None


def _agreed_schema(hashes: NDArray[np.int64], details: Sequence[bytes], *, group: dist.ProcessGroup) -> SampleSchema:
    """The one schema of the ranks that have one; raises where there are two."""
    known = np.flatnonzero(hashes != NO_SCHEMA)
    reference_rank = known[0]
    reference = SampleSchema.from_bytes(details[reference_rank])
    differing = [value for value in _distinct(hashes[known]) if value != hashes[reference_rank]]
    if differing:
        phrases: list[str] = []
        for value in differing[:MAX_RANKS_NAMED]:
            schema = SampleSchema.from_bytes(details[int(np.argmax(hashes == value))])
            phrases.append(
                f"on {ranks_where(hashes == value, group=group)} " + ", ".join(schema.differences(reference))
            )
        first = dist.get_global_rank(group, int(reference_rank))
        raise BalanceError(f"Samples differ from those of rank {first}: " + "; ".join(phrases) + ".")
    return reference


def _seen(values: NDArray[np.int64], *, group: dist.ProcessGroup, form: str = "") -> str:
    """Each value and the ranks that have it."""
    return "; ".join(f"{value:{form}} on {ranks_where(values == value, group=group)}" for value in _distinct(values))


def _distinct(values: NDArray[np.int64]) -> list[int]:
    """The values in the order in which they first occur."""
    return list(dict.fromkeys(values.tolist()))


def _check_equally_packed(unpacked: NDArray[np.bool_], *, group: dist.ProcessGroup) -> None:
    if unpacked.any() and not unpacked.all():
        raise BalanceError(
            f"Rows of {ranks_where(unpacked, group=group)} have no cu_seqlens, and those of "
            f"{ranks_where(~unpacked, group=group)} have: every rank must load packed (thd) data, or none."
        )
