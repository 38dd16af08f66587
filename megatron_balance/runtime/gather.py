"""Gathers the lengths of all samples on every rank, and checks that all ranks can continue.

Without the check a rank whose data raised an error would leave its peers in the next collective. So every rank sends an
announcement with its lengths: error, settings, step and schema. All ranks read all of them, and adopt the one schema or
raise one error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError
from megatron_balance.model.vision import patches_of_grids
from megatron_balance.runtime.comm import Device, all_gather_bytes, ranks_by_value
from megatron_balance.runtime.failure import MAX_NAMED, Failure, mismatch
from megatron_balance.samples.sample import Samples, SampleSchema
from megatron_balance.samples.shared_prefixes import HashChains

GRID_KEYS = ("image_grid_thw", "video_grid_thw")

Ints = NDArray[np.int64]


class OutOfStepError(BalanceError):
    """Ranks make different steps at the same time, and would never meet again."""


@dataclass(frozen=True, eq=False)
class GatheredLengths:
    """The samples of all ranks; a sample's id is its index here.

    Attributes:
        lengths: int64 `[num_samples]`, tokens (`original_seq_len`), in the order (rank, local index).
        home_ranks: int64 `[num_samples]`, the rank in the group that loaded the sample.
        schema: of all samples; None where no rank has any.
        reported: int64 `[dp_size, k]`, the numbers that each rank sent along.
        ragged_lengths: int64 `[num_samples, num_ragged]`, entries of each ragged key, in the schema's order.
        values: int64 `[num_samples, k]`, further numbers of each sample that ranks sent along.
        chains: hashes of what the samples begin with, where all ranks have made them.
    """

    lengths: Ints
    home_ranks: Ints
    schema: SampleSchema | None
    reported: Ints
    ragged_lengths: Ints
    values: Ints
    chains: HashChains | None = None


def gather_lengths(
    samples: Samples | Failure,
    *,
    group: dist.ProcessGroup,
    settings: Mapping[str, str] | None = None,
    step: int = 0,
    reported: Sequence[int] = (),
    device: Device = "cpu",
) -> GatheredLengths:
    """Gather the lengths of all ranks' samples, and check that they go together.

    Args:
        samples: of this rank; may be empty. A rank without samples and schema adopts the schema of the others.
            `Samples.values` are as many on every rank, `Samples.chains` on all or none. Or the failure to get them,
            which every rank raises here.
        group: the data-parallel ranks (without context parallelism: those that load different samples).
        settings: of this rank; must be equal on all ranks, as must the number of the step.
        step: its number in a run.
        reported: as many numbers on every rank.
        device: where the collective's buffers live: `cuda` for NCCL.

    Raises:
        BalanceError: on every rank, naming the ranks: an error on some rank, samples that differ on one rank or
            between ranks, different settings.
        OutOfStepError: on every rank: different steps.
    """
    failure, samples = (samples, Samples.joined([])) if isinstance(samples, Failure) else (None, samples)
    error, cause = (None, None) if failure is None else (failure.text, failure.error)
    schema = None if samples.schema is None else samples.schema.to_text()
    values = [] if samples.values is None else [samples.values]
    table = np.hstack([samples.lengths[:, None], samples.ragged_lengths, *values])
    columns = [] if samples.chains is None else [samples.chains.counts, samples.chains.ends, samples.chains.hashes]
    numbers = np.concatenate([[*reported, table.size], table.ravel(), *(column.view(np.int64) for column in columns)])
    announcement = json.dumps([error, {**(settings or {})}, step, schema]).encode()
    operation = "the lengths of all ranks' samples (gather)"
    payload = announcement + b"\n" + numbers.astype(np.int64).tobytes()
    parts = all_gather_bytes(payload, group=group, device=device, operation=operation)
    texts, data = zip(*(part.split(b"\n", 1) for part in parts), strict=True)
    decoded = {text: json.loads(text) for text in {*texts}}  # most are equal
    common = _common_schema([decoded[text] for text in texts], group=group, cause=cause)
    num_ragged = 0 if common is None else common.num_ragged
    # A rank without samples may have learned of ragged keys only now.
    num_columns = 1 + num_ragged + sum(column.shape[1] for column in values)
    tables, chains, first = list[Ints](), list[list[Ints]](), len(reported) + 1
    of_ranks = [np.frombuffer(of_rank, dtype=np.int64) for of_rank in data]
    for of_rank in of_ranks:
        end = first + int(of_rank[first - 1])
        tables.append(of_rank[first:end].reshape(-1, num_columns))
        counts, hashed = np.split(of_rank[end:], [len(tables[-1])])
        chains.append([counts, *np.split(hashed, 2)])
    counts, ends, hashes = map(np.concatenate, zip(*chains, strict=True))
    table = np.concatenate(tables)
    return GatheredLengths(
        lengths=table[:, 0].copy(),
        home_ranks=np.repeat(np.arange(group.size()), [*map(len, tables)]),
        schema=common,
        reported=np.stack([of_rank[: len(reported)] for of_rank in of_ranks]),
        ragged_lengths=table[:, 1 : 1 + num_ragged],
        values=table[:, 1 + num_ragged :],
        chains=None if samples.chains is None else HashChains(counts, ends, hashes.view(np.uint64)),
    )


def _common_schema(
    announcements: Sequence[Any], *, group: dist.ProcessGroup, cause: Exception | None
) -> SampleSchema | None:
    """The one schema of the ranks that have one; raises where there are two, or where announcements do not match."""
    errors, settings, steps, schemas = zip(*announcements, strict=True)
    if len({*steps}) > 1:
        ranks_of_steps = ranks_by_value(steps, group=group)
        raise OutOfStepError(
            f"Ranks make different steps of this run at the same time, counted from 0: "
            f"{'; '.join(f'{step} on {ranks}' for step, ranks in ranks_of_steps.items())}. Some ranks got a new "
            "iterator after prefetching from the old one. Pass a new iterator on every rank or on none, or set "
            "--no-balance-overlap."
        )
    if reason := mismatch(errors, settings, group=group):
        raise BalanceError(reason) from cause
    first: SampleSchema | None = None
    first_ranks, phrases = "", list[str]()
    for text, ranks in ranks_by_value(schemas, group=group).items():
        schema = None if text is None else SampleSchema.from_text(text)
        if first is None:
            first, first_ranks = schema, ranks
        elif schema is not None:
            phrases.append(f"on {ranks} " + ", ".join(schema.differences(first)))
    if phrases:
        raise BalanceError(f"Samples differ from those of {first_ranks}: " + "; ".join(phrases[:MAX_NAMED]) + ".")
    return first


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
