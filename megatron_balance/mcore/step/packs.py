"""Packs the samples that this rank runs into its micro-batches.

A *leaf* is one context-parallel rank of one data-parallel rank: `dp_rank * cp_size + cp_rank`. With dynamic context
parallelism a sample is sent to every leaf that shares it: the s leaves that share a micro-batch of size s pack it
identically, with sequences padded for s, and each computes its part. Leaves of one replica may run different numbers of
micro-batches, and every rank of the replica knows those of all, so that all agree on them.

Pipeline stages that load no data get the starts of sequences alone. Between the first stage and the last, Megatron's
own `get_batch` (pretrain_gpt.py and pretrain_hybrid.py, from 0.18) takes `cu_seqlens`, `cu_seqlens_padded` and
`max_seqlen` from a micro-batch and returns None for all other keys; they are those of the pack that the stage would
have received.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_balance.errors import BalanceError
from megatron_balance.mcore.setup.shape_buckets import filled_tokens
from megatron_balance.mcore.step.balanced_step import BalancedStep, LeafSlots, Microbatch
from megatron_balance.planner import DataSchedule
from megatron_balance.runtime.exchange import HostBuffers, PreparedExchange, checked_destinations, prepare_exchange
from megatron_balance.runtime.gather import GatheredLengths
from megatron_balance.samples.packing import dummy_microbatch, lengths_as_packed, pack_microbatch, sequence_starts
from megatron_balance.samples.sample import Sample, SampleSchema
from megatron_balance.samples.wire import ALIGNMENT_NBYTES
from megatron_balance.topology import Topology


def tokens_of_leaves(schedule: DataSchedule, *, shape_bucket: int) -> list[list[int]]:
    """Tokens of every leaf's micro-batches once they are filled up, over all ranks that share them.

    Args:
        schedule: the plan.
        shape_bucket: `--balance-shape-bucket`.
    """
    sizes = schedule.cp_size_grid
    tokens = schedule.slot_tokens().reshape(len(sizes), -1)
    for size in np.unique(sizes[sizes > 0]).tolist():
        here, topology = sizes == size, schedule.topology.at_cp_size(size)
        tokens[here] = filled_tokens(tokens[here], topology=topology, limits=schedule.limits, shape_bucket=shape_bucket)
    num_slots: list[int] = (sizes > 0).sum(axis=1).tolist()
    return [of_leaf[:count] for of_leaf, count in zip(tokens.tolist(), num_slots, strict=True)]


def leaf_slots(schedule: DataSchedule, *, leaf: int, num_tokens: list[int], gathered: GatheredLengths) -> LeafSlots:
    """The micro-batches that a leaf runs.

    Args:
        schedule: the plan.
        leaf: index of the leaf.
        num_tokens: its row of `tokens_of_leaves`.
        gathered: lengths of the samples that the plan places.
    """
    slots = schedule.ranks[leaf]
    return LeafSlots(
        list(schedule.cp_sizes[leaf]),
        num_tokens=num_tokens,
        sequence_lengths=[_sequence_lengths(slot, gathered=gathered) for slot in slots],
    )


def _sequence_lengths(sample_ids: Sequence[int], *, gathered: GatheredLengths) -> list[int]:
    ids = np.array(sample_ids, dtype=np.int64)
    segments = gathered.segments_of(ids)
    lengths = gathered.lengths[ids].tolist() if segments is None else [n for of_one in segments for n in of_one]
    return [length for length in lengths if length]


@dataclass(frozen=True)
class OwnSlots:
    """The micro-batches of this rank, not packed yet.

    Attributes:
        slots: samples of each micro-batch; none for a dummy.
        num_tokens: of each, over its context-parallel ranks, filler included.
        cp_sizes: context-parallel ranks of each.
        step_tokens: of all micro-batches of the step.
        leaves: as in BalancedStep.
    """

    slots: list[list[Sample]]
    _: KW_ONLY
    num_tokens: list[int]
    cp_sizes: list[int]
    step_tokens: int
    leaves: tuple[LeafSlots, ...] | None = None


def prepare_samples(
    samples: Sequence[Sample],
    *,
    schedule: DataSchedule,
    gathered: GatheredLengths,
    dp_group: dist.ProcessGroup,
    cp_rank: int,
    buffers: HostBuffers | None = None,
) -> PreparedExchange:
    """Write the samples that this rank sends to those that run them. No collective.

    Args:
        samples: that this rank loaded, as gathered.
        schedule: the plan.
        gathered: lengths of all samples.
        dp_group: ranks that load different samples.
        cp_rank: context-parallel rank of this one. All of a replica's load the same samples.
        buffers: of exchanges between CPUs; what arrives is lost with the next step.
    """
    if schedule.topology.dynamic_cp:
        sample_ids, destinations = schedule.copies(cp_rank=cp_rank)
    else:
        destinations = checked_destinations(schedule.destinations(), gathered=gathered, group_size=dp_group.size())
        sample_ids = np.arange(destinations.size, dtype=np.int64)
    return prepare_exchange(
        samples,
        sample_ids=sample_ids,
        destinations=destinations,
        gathered=gathered,
        group=dp_group,
        buffers=buffers,
    )


def own_slots(
    mine: Mapping[int, Sample],
    *,
    schedule: DataSchedule,
    gathered: GatheredLengths,
    dp_rank: int,
    cp_rank: int,
    shape_bucket: int,
) -> OwnSlots:
    """The micro-batches of this rank.

    Args:
        mine: sample id → sample, as the exchange returned them.
        schedule: the plan.
        gathered: lengths of all samples.
        dp_rank: this rank among those that load different samples.
        cp_rank: context-parallel rank of this one.
        shape_bucket: `--balance-shape-bucket`.
    """
    if schedule.topology.dynamic_cp:
        return _of_leaf(
            mine, schedule=schedule, gathered=gathered, dp_rank=dp_rank, cp_rank=cp_rank, shape_bucket=shape_bucket
        )
    topology = schedule.topology
    tokens = filled_tokens(schedule.slot_tokens(), topology=topology, limits=schedule.limits, shape_bucket=shape_bucket)
    return OwnSlots(
        [[mine[sample] for sample in slot] for slot in schedule.ranks[dp_rank]],
        num_tokens=tokens.reshape(topology.dp_size, -1)[dp_rank].tolist(),
        cp_sizes=[topology.cp_size] * schedule.num_microbatches,
        step_tokens=int(tokens.sum()),
    )


def _of_leaf(
    mine: Mapping[int, Sample],
    *,
    schedule: DataSchedule,
    gathered: GatheredLengths,
    dp_rank: int,
    cp_rank: int,
    shape_bucket: int,
) -> OwnSlots:
    tokens = tokens_of_leaves(schedule, shape_bucket=shape_bucket)
    cp_size = schedule.topology.cp_size
    first = dp_rank * cp_size
    leaves = tuple(
        leaf_slots(schedule, leaf=leaf, num_tokens=tokens[leaf], gathered=gathered)
        for leaf in range(first, first + cp_size)
    )
    own = leaves[cp_rank]
    return OwnSlots(
        [[mine[sample] for sample in slot] for slot in schedule.ranks[first + cp_rank]],
        num_tokens=own.num_tokens,
        cp_sizes=own.cp_sizes,
        step_tokens=sum(
            of_slot // size
            for of_leaf, sizes in zip(tokens, schedule.cp_sizes, strict=True)
            for of_slot, size in zip(of_leaf, sizes, strict=True)
        ),
        leaves=leaves,
    )


def pack_slots(own: OwnSlots, *, topology: Topology, schema: SampleSchema, pin_memory: bool) -> list[Microbatch]:
    """Pack the micro-batches of this rank.

    Args:
        own: their samples and sizes.
        topology: the ranks.
        schema: of all samples.
        pin_memory: copy them to one block of pinned memory, for a GPU: torch keeps blocks, and a new one may make the
            device wait.
    """
    packs: list[Microbatch] = []
    for slot, num_tokens, cp_size in zip(own.slots, own.num_tokens, own.cp_sizes, strict=True):
        pack = functools.partial(pack_microbatch, slot) if slot else functools.partial(dummy_microbatch, schema)
        token_multiple = topology.at_cp_size(cp_size).token_multiple
        packs.append(pack(token_multiple=token_multiple, cp_size=cp_size, num_tokens=num_tokens))
    return pinned(packs) if pin_memory else packs


def pinned(packs: Sequence[Microbatch]) -> list[Microbatch]:
    """The packs in one block of pinned memory."""
    sizes = [-(-tensor.nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES for pack in packs for tensor in pack.values()]
    parts = iter(torch.empty(sum(sizes), dtype=torch.uint8).pin_memory().split(sizes))

    def placed(tensor: Tensor) -> Tensor:
        return next(parts)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    return [{name: placed(tensor) for name, tensor in pack.items()} for pack in packs]


def checksum(parts: Sequence[Microbatch] | Sequence[Sample]) -> int:
    """Checksum over tokens and their positions in micro-batches or samples."""
    sums: list[Tensor] = []
    for part in parts:
        tokens = (part.per_token if isinstance(part, Sample) else part)["tokens"].flatten().long()
        sums.append((tokens * torch.arange(1, tokens.numel() + 1, device=tokens.device)).sum())
    total = 0
    for of_part in torch.stack(sums).tolist() if sums else []:  # one wait where they are on a GPU
        total = 31 * total + of_part
    return total


class StageMicrobatch(dict[str, Tensor]):
    """Starts of the sequences of a micro-batch. Reading any other key is an error, since its values are not here."""

    def __missing__(self, key: Any) -> NoReturn:
        raise BalanceError(
            f"The forward step asks for '{key}' on a pipeline stage between the first and the last, which loads no "
            f"data: it has {', '.join(self)}. Set --balance-load-every-stage, or read the others on the first and last "
            "stage alone, as Megatron's own get_batch does."
        )


def stage_microbatches(step: BalancedStep, *, topology: Topology, pin_memory: bool = False) -> list[Microbatch]:
    """The micro-batches of a step on a stage that loads no data.

    Args:
        step: with sequence lengths.
        topology: the ranks.
        pin_memory: copy them to pinned memory, for a GPU.
    """
    assert step.sequence_lengths is not None, "ranks that load no data are sent them"
    sizes = step.cp_sizes or [topology.cp_size] * step.num_microbatches
    microbatches: list[Microbatch] = []
    for lengths, num_tokens, size in zip(step.sequence_lengths, step.microbatch_tokens, sizes, strict=True):
        multiple = topology.at_cp_size(size).token_multiple
        as_packed = lengths_as_packed(lengths, num_tokens=num_tokens, token_multiple=multiple)
        starts = sequence_starts(lengths, as_packed=as_packed, cp_size=size)
        microbatches.append(starts)
    return [StageMicrobatch(starts) for starts in (pinned(microbatches) if pin_memory else microbatches)]
