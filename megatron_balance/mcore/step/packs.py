"""Packs the samples that this rank runs into its micro-batches.

A *leaf* is one context-parallel rank of one data-parallel rank: `dp_rank * cp_size + cp_rank`. With dynamic context
parallelism a sample is sent to every leaf that shares it: the s leaves that share a micro-batch of size s pack it
identically, with sequences padded for s, and each computes its part. Leaves of one replica may run different numbers of
micro-batches, and every rank of the replica knows those of all.

Pipeline stages without an iterator get the starts of sequences alone: `cu_seqlens`, `cu_seqlens_padded` and
`max_seqlen` are all that attention reads between the first stage and the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_balance.mcore.setup.alignment import filled_tokens
from megatron_balance.mcore.step.balanced_step import Microbatch, Slots
from megatron_balance.planner import DataSchedule
from megatron_balance.runtime.gather import GatheredLengths
from megatron_balance.samples.packing import lengths_as_packed, pack_microbatch, sequence_starts
from megatron_balance.samples.sample import Sample, SampleSchema, aligned
from megatron_balance.topology import Topology


def slots_of_replica(
    schedule: DataSchedule, *, dp_rank: int, gathered: GatheredLengths, shape_bucket: int
) -> tuple[tuple[Slots, ...], int]:
    """What each leaf of a data-parallel rank runs, one for all where sizes do not differ; tokens of the whole step."""
    sizes, dynamic = schedule.cp_size_grid, schedule.topology.dynamic_cp
    tokens = schedule.slot_tokens().reshape(sizes.shape)
    for size in np.unique(sizes[sizes > 0]).tolist():
        here, topology = sizes == size, schedule.topology.at_cp_size(size)
        tokens[here] = filled_tokens(tokens[here], topology=topology, limits=schedule.limits, shape_bucket=shape_bucket)
    tokens[sizes == 0] = 0
    width = schedule.topology.cp_size if dynamic else 1
    replica = tuple(
        Slots(
            sizes[leaf][sizes[leaf] > 0].tolist(),
            tokens[leaf][sizes[leaf] > 0].tolist(),
            [_sequence_lengths(slot, gathered=gathered) for slot in schedule.ranks[leaf]],
        )
        for leaf in range(dp_rank * width, (dp_rank + 1) * width)
    )
    return replica, int((tokens // np.maximum(sizes, 1) if dynamic else tokens).sum())


def _sequence_lengths(sample_ids: Sequence[int], *, gathered: GatheredLengths) -> list[int]:
    ids = np.array(sample_ids, dtype=np.int64)
    return [length for of_one in gathered.segments_of(ids) for length in of_one if length]


def pack(
    mine: Mapping[int, Sample],
    *,
    leaf: Sequence[Sequence[int]],
    slots: Slots,
    topology: Topology,
    schema: SampleSchema,
    pin_memory: bool,
) -> list[Microbatch]:
    """The micro-batches of a leaf, of whose samples it has the ids of each (none in a dummy) and all by id."""
    packs: list[Microbatch] = []
    for ids, num_tokens, cp_size in zip(leaf, slots.num_tokens, slots.cp_sizes, strict=True):
        multiple = topology.at_cp_size(cp_size).token_multiple
        samples = [mine[sample] for sample in ids]
        packs.append(
            pack_microbatch(samples, schema=schema, token_multiple=multiple, cp_size=cp_size, num_tokens=num_tokens)
        )
    return pinned(packs) if pin_memory else packs


def pinned(packs: Sequence[Microbatch]) -> list[Microbatch]:
    """The packs in one block of pinned memory: torch keeps blocks, and a new one may make the device wait."""
    sizes = [aligned(tensor.nbytes) for pack in packs for tensor in pack.values()]
    parts = iter(torch.empty(sum(sizes), dtype=torch.uint8).pin_memory().split(sizes))

    def placed(tensor: Tensor) -> Tensor:
        return next(parts)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    return [{name: placed(tensor) for name, tensor in pack.items()} for pack in packs]


def checksum(parts: Sequence[Microbatch] | Sequence[Sample]) -> int:
    """Checksum over tokens and their positions in micro-batches or samples."""
    total = 0
    for part in parts:
        tokens = (part.per_token if isinstance(part, Sample) else part)["tokens"].flatten().long()
        total = 31 * total + int((tokens * torch.arange(1, tokens.numel() + 1)).sum())
    return total


def stage_microbatches(slots: Slots, *, topology: Topology, pin_memory: bool) -> list[Microbatch]:
    """The micro-batches of a stage without an iterator."""
    microbatches: list[Microbatch] = []
    for lengths, num_tokens, size in zip(slots.sequence_lengths, slots.num_tokens, slots.cp_sizes, strict=True):
        multiple = topology.at_cp_size(size).token_multiple
        as_packed = lengths_as_packed(lengths, num_tokens=num_tokens, token_multiple=multiple)
        microbatches.append(sequence_starts(lengths, as_packed=as_packed, cp_size=size))
    return pinned(microbatches) if pin_memory else microbatches
