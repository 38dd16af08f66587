"""Receives the samples that this rank runs, and packs them into its micro-batches.

With dynamic context parallelism a sample is sent to every rank that shares it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_balance.mcore.setup.shape_buckets import filled_tokens
from megatron_balance.mcore.step.leaf_slots import LeafSlots, leaf_slots, tokens_of_leaves
from megatron_balance.planner import DataSchedule
from megatron_balance.runtime.exchange import checked_destinations
from megatron_balance.runtime.gathered import GatheredLengths
from megatron_balance.runtime.host_buffers import HostBuffers
from megatron_balance.runtime.prepared_exchange import PreparedExchange, prepare_exchange
from megatron_balance.samples.packing import dummy_microbatch, pack_microbatch
from megatron_balance.samples.sample import Sample, SampleSchema
from megatron_balance.samples.wire import ALIGNMENT_NBYTES
from megatron_balance.topology import Topology

Microbatch = dict[str, Tensor]


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
