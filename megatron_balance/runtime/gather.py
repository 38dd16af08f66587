"""Gathers the lengths of all samples on every rank, and checks that all ranks can continue.

Without the check a rank whose data raised an error would leave its peers in the next collective. So every rank sends a
hash of its announcement: error, settings and schema. Where two differ, all ranks read all announcements, and adopt the
one schema or raise one error.

The values of a rank are for each sample its length, the entries of its ragged keys, and its further values. One
all_gather brings a row of `HEADER_FIELDS + row_values` int64 a rank (1 KiB by default), a second one what did not fit
on some rank.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError
from megatron_balance.model.vision import patches_of_grids
from megatron_balance.runtime.comm import Device, all_gather_bytes, all_gather_row, ranks_by_value
from megatron_balance.runtime.failure import MAX_NAMED, Failure, mismatch
from megatron_balance.samples.sample import Samples, SampleSchema
from megatron_balance.samples.shared_prefixes import HashChains

STEP, ANNOUNCEMENT_HASH, NUM_SAMPLES, REPORTED = range(4)
NUM_REPORTED = 5
"""Numbers of a rank that travel along: whether its iterator is new, plans that its training process had to make, memory
of its device (2), the time of a step."""

HEADER_FIELDS = REPORTED + NUM_REPORTED
ROW_MULTIPLE = 64  # int64: 512 bytes
INLINE_LENGTHS = 2 * ROW_MULTIPLE - HEADER_FIELDS
"""Values of a rank that the first gather of a run has room for: with its header they fill 1 KiB."""

GRID_KEYS = ("image_grid_thw", "video_grid_thw")


@dataclass(frozen=True)
class Header:
    """What a rank sends with its lengths in a run of steps; `settings` and `step` must be equal on all ranks.

    `row_values` are sent before a rank knows those of the others, equal on all ranks: the default, or `next_row_values`
    of the last gather that all of them completed.
    """

    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    step: int = 0
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
        schema: of all samples; None where no rank has any.
        next_row_values: `row_values` for a next gather of about as many samples; the same on every rank.
        reported: int64 `[dp_size, NUM_REPORTED]`, the numbers that each rank sent along.
        ragged_lengths: int64 `[num_samples, num_ragged]`, entries of each ragged key, in the schema's order.
        values: int64 `[num_samples, k]`, further numbers of each sample that ranks sent along.
    """

    lengths: NDArray[np.int64]
    home_ranks: NDArray[np.int64]
    schema: SampleSchema | None
    next_row_values: int
    reported: NDArray[np.int64]
    ragged_lengths: NDArray[np.int64]
    values: NDArray[np.int64]


def gather_lengths(
    samples: Samples | Failure, *, group: dist.ProcessGroup, header: Header = Header(), device: Device = "cpu"
) -> GatheredLengths:
    """Gather the lengths of all ranks' samples, and check that they go together.

    Args:
        samples: of this rank; may be empty. A rank without samples and schema adopts the schema of the others.
            `Samples.values` are as many on every rank. Or the failure to get them, which every rank raises here.
        group: the data-parallel ranks (without context parallelism: those that load different samples).
        header: of this rank, in a run of steps.
        device: where the collective's buffers live: `cuda` for NCCL.

    Raises:
        BalanceError: on every rank, naming the ranks: an error on some rank, samples that differ on one rank or
            between ranks, different settings.
        OutOfStepError: on every rank: different steps.
    """
    failure, samples = (samples, Samples.joined([])) if isinstance(samples, Failure) else (None, samples)
    error, cause = (None, None) if failure is None else (failure.text, failure.error)
    schema, values = samples.schema, [] if samples.values is None else [samples.values]
    table = np.hstack([samples.lengths[:, None], samples.ragged_lengths, *values])
    sent = table.ravel()

    announcement = json.dumps([error, {**header.settings}, None if schema is None else schema.to_text()]).encode()
    row = np.zeros(HEADER_FIELDS + header.row_values, dtype=np.int64)
    row[STEP] = header.step
    row[ANNOUNCEMENT_HASH] = int.from_bytes(hashlib.sha256(announcement).digest()[:8], "little", signed=True)
    row[NUM_SAMPLES] = len(table)
    row[REPORTED:HEADER_FIELDS] = header.reported
    row[HEADER_FIELDS : HEADER_FIELDS + len(sent)] = sent[: header.row_values]
    headers = all_gather_row(row, group=group, device=device, operation="the lengths of all ranks' samples (gather)")
    steps = ranks_by_value(headers[:, STEP].tolist(), group=group)
    if len(steps) > 1:
        raise OutOfStepError(
            f"Ranks make different steps of this run at the same time, counted from 0: "
            f"{'; '.join(f'{step} on {ranks}' for step, ranks in steps.items())}. Some ranks got a new iterator after "
            "prefetching from the old one. Pass a new iterator on every rank or on none, or set --no-balance-overlap."
        )
    if len({*headers[:, ANNOUNCEMENT_HASH].tolist()}) > 1 or error is not None:
        operation = "the schemas or errors of all ranks (gather)"
        texts = all_gather_bytes(announcement, group=group, device=device, operation=operation)
        schema = _common_schema(texts, group=group, cause=cause)

    num_ragged = 0 if schema is None else schema.num_ragged
    # A rank without samples may have learned of ragged keys only now.
    num_columns = 1 + num_ragged + sum(column.shape[1] for column in values)
    num_samples = headers[:, NUM_SAMPLES]
    padded, max_values = headers[:, HEADER_FIELDS:], int(num_samples.max()) * num_columns
    if max_values > header.row_values:
        row = np.zeros(max_values - header.row_values, dtype=np.int64)
        row[: max(len(sent) - header.row_values, 0)] = sent[header.row_values :]
        rows = all_gather_row(row, group=group, device=device, operation="the remaining lengths (gather)")
        padded = np.concatenate([padded, rows], axis=1)

    table = padded[np.arange(padded.shape[1]) < num_samples[:, None] * num_columns].reshape(-1, num_columns)
    # Room for a quarter more than the rank with the most values has: from step to step numbers rarely vary by more.
    next_row = -(-(HEADER_FIELDS + max_values * 5 // 4) // ROW_MULTIPLE) * ROW_MULTIPLE
    return GatheredLengths(
        lengths=table[:, 0].copy(),
        home_ranks=np.repeat(np.arange(group.size(), dtype=np.int64), num_samples),
        schema=schema,
        reported=headers[:, REPORTED:HEADER_FIELDS],
        next_row_values=max(INLINE_LENGTHS, next_row - HEADER_FIELDS),
        ragged_lengths=table[:, 1 : 1 + num_ragged],
        values=table[:, 1 + num_ragged :],
    )


def _common_schema(
    announcements: Sequence[bytes], *, group: dist.ProcessGroup, cause: Exception | None
) -> SampleSchema:
    """The one schema of the ranks that have one; raises where there are two, or where announcements do not match."""
    errors, settings, schemas = zip(*map(json.loads, announcements), strict=True)
    if reason := mismatch(errors, settings, group=group):
        raise BalanceError(reason) from cause
    (first, first_ranks), *others = (
        (SampleSchema.from_text(text), ranks)
        for text, ranks in ranks_by_value(schemas, group=group).items()
        if text is not None
    )
    if phrases := [f"on {ranks} " + ", ".join(schema.differences(first)) for schema, ranks in others]:
        raise BalanceError(f"Samples differ from those of {first_ranks}: " + "; ".join(phrases[:MAX_NAMED]) + ".")
    return first


def gather_chains(chains: HashChains | Failure, *, group: dist.ProcessGroup, device: Device = "cpu") -> HashChains:
    """The hash chains of the samples of all ranks, in the order of `gather_lengths`.

    Args:
        chains: of this rank's samples, or the failure to make them, which every rank raises here.
        group: as of `gather_lengths`.
        device: where the collective's buffers live: `cuda` for NCCL.

    Raises:
        BalanceError: on every rank: an error on some rank.
    """
    error, columns = None, [[0]]
    if isinstance(chains, Failure):
        error = chains.text
    else:
        columns = [[chains.counts.size], chains.counts, chains.ends, chains.hashes.view(np.int64)]
    payload = json.dumps(error).encode() + b"\n" + np.concatenate(columns).tobytes()
    operation = "the hashes of all ranks' samples (gather)"
    parts = all_gather_bytes(payload, group=group, device=device, operation=operation)
    texts, data = zip(*(part.split(b"\n", 1) for part in parts), strict=True)
    if reason := mismatch([*map(json.loads, texts)], (), group=group):
        raise BalanceError(reason)
    counts, ends, hashes = map(np.concatenate, zip(*map(_columns, data), strict=True))
    return HashChains(counts, ends, hashes.view(np.uint64))


def _columns(data: bytes) -> list[NDArray[np.int64]]:
    """Counts, ends and hashes of the samples of a rank."""
    values = np.frombuffer(data, dtype=np.int64)
    num_samples = int(values[0])
    return np.split(values[1:], [num_samples, num_samples + (values.size - 1 - num_samples) // 2])


def image_patches(samples: Samples) -> NDArray[np.int64]:
    """`[num_samples, 2]`: patches of each sample's images, by Qwen-VL's grids, and the sum of their squares."""
    sums = np.zeros((len(samples), 2), dtype=np.int64)
    ragged = [key.name for key in (samples.schema.keys if samples.schema else ()) if key.kind == "ragged"]
    grids = [samples.columns[name] for name in GRID_KEYS if name in ragged]
    if "pixel_values" in ragged and not grids:
        raise BalanceError(
            f"pixel_values come without {' or '.join(GRID_KEYS)}, from which patches are counted: give one, or "
            "plan by tokens: drop --balance-by-flops."
        )
    for column in grids:
        for index, grid in enumerate(column):
            patches = patches_of_grids(grid.numpy())
            sums[index] += patches.sum(), (patches**2).sum()
    return sums
