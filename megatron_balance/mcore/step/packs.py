"""Packs the samples that this rank runs into its micro-batches.

A *leaf* is one context-parallel rank of one data-parallel rank: `dp_rank * cp_size + cp_rank`. With dynamic context
parallelism a sample is sent to every leaf that shares it: the s leaves that share a micro-batch of size s pack it
identically, with sequences padded for s, and each computes its part. Leaves of one replica may run different numbers of
micro-batches, and every rank of the replica knows those of all.

Pipeline stages without an iterator get the starts of sequences alone: `cu_seqlens`, `cu_seqlens_padded` and
`max_seqlen` are all that attention reads between the first stage and the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_balance.mcore.setup.alignment import filled_tokens
from megatron_balance.mcore.step.balanced_step import Microbatch, Slots
from megatron_balance.planner import DataSchedule
from megatron_balance.samples.packing import pack_microbatch, sequence_starts
from megatron_balance.samples.sample import Sample, SampleSchema, aligned
from megatron_balance.topology import Topology


def slots_of_replica(schedule: DataSchedule, *, dp_rank: int, shape_bucket: int) -> tuple[tuple[Slots, ...], int]:
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
            [[length for length in schedule.lengths[[*slot]].tolist() if length] for slot in schedule.ranks[leaf]],
        )
        for leaf in range(dp_rank * width, (dp_rank + 1) * width)
    )
    return replica, int((tokens // np.maximum(sizes, 1) if dynamic else tokens).sum())


def pack(
    slots: Slots,
    *,
    topology: Topology,
    pin_memory: bool,
    samples: Sequence[Sequence[Sample]] | None = None,
    schema: SampleSchema | None = None,
) -> list[Microbatch]:
    """The micro-batches of a leaf, from the samples of each; without samples, the starts of their sequences."""
    packs: list[Microbatch] = []
    for slot, (cp_size, num_tokens) in enumerate(zip(slots.cp_sizes, slots.num_tokens, strict=True)):
        sizes: Any = {"token_multiple": topology.at_cp_size(cp_size).token_multiple, "cp_size": cp_size}
        if samples is None:
            packs.append(sequence_starts(slots.sequence_lengths[slot], num_tokens=num_tokens, **sizes))
        else:
            packs.append(pack_microbatch(samples[slot], schema=schema, num_tokens=num_tokens, **sizes))
    return pinned(packs) if pin_memory else packs


def pinned(packs: Sequence[Microbatch]) -> list[Microbatch]:
    """The packs in one block of pinned memory: torch keeps blocks, and a new one may make the device wait."""
    sizes = [aligned(tensor.nbytes) for pack in packs for tensor in pack.values()]
    parts = iter(torch.empty(sum(sizes), dtype=torch.uint8).pin_memory().split(sizes))

    def placed(tensor: Tensor) -> Tensor:
        return next(parts)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    return [{name: placed(tensor) for name, tensor in pack.items()} for pack in packs]


def checksum(parts: Iterable[Mapping[str, Tensor]]) -> int:
    """Checksum over tokens and their positions in micro-batches or samples."""
    total = 0
    for part in parts:
        tokens = part["tokens"].flatten().long()
        total = 31 * total + int((tokens * torch.arange(1, tokens.numel() + 1)).sum())
    return total
