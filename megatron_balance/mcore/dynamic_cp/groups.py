"""Process groups for micro-batches of different context-parallel sizes.

The ranks of one tensor-parallel rank and pipeline stage are a *lane* of `dp_size * cp_size` *leaves*, in the order of
Megatron's data-parallel group with context parallelism: context-parallel ranks innermost. A group of `size` leaves
starts at a multiple of `size`.

Invariant: all ranks of the world make all groups, in one order (`setup/groups.py`), before training. Megatron's own
context-parallel group serves its size; no group is shared with the gradient reduction.
"""

# Megatron types its getters Optional; before training they are not.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_balance.mcore.setup.groups import split_world


@dataclass(frozen=True)
class ContextGroups:
    """The groups of this rank.

    Attributes:
        by_size: group of each size; a rank whose leaf is in no whole group of a size lacks that size.
        static_size: `--context-parallel-size`, which evaluation runs at.
        with_tensor: the same groups with all their tensor-parallel ranks, over which routers sum; empty where none has
            a loss of its own.
    """

    by_size: Mapping[int, dist.ProcessGroup]
    static_size: int
    with_tensor: Mapping[int, dist.ProcessGroup] = field(default_factory=dict[int, dist.ProcessGroup])

    def of_size(self, size: int) -> dist.ProcessGroup:
        """The group of `size` ranks that this rank is in."""
        return self.by_size[size]

    def of_attention(self, size: int) -> dist.ProcessGroup | None:
        """The group for attention kernels; None for one rank, where attention exchanges nothing."""
        return None if size == 1 else self.by_size[size]


def connect(groups: ContextGroups) -> int:
    """Exchange a number with both neighbours in each group, before the first step; all members call it.

    Transformer Engine sends keys and values around a ring of more than two ranks in messages of their own, for each
    of which NCCL connects a pair of ranks when it first talks (context_parallel.py:124-133 of 2.18): in the middle of a
    run, when memory is full. The order of calls is that of its ring, even ranks first.

    Returns:
        Bytes of device memory that it took.
    """
    on_gpu = any(dist.get_backend(group) == "nccl" for group in groups.by_size.values())
    device = "cuda" if on_gpu else "cpu"
    free = torch.cuda.mem_get_info()[0] if on_gpu else 0
    for size, group in sorted(groups.by_size.items()):
        if size == 1:
            continue
        rank, numbers = group.rank(), torch.zeros(2, device=device)
        send = functools.partial(dist.isend, numbers[0], group=group, group_dst=(rank + 1) % size)
        receive = functools.partial(dist.irecv, numbers[1], group=group, group_src=(rank - 1) % size)
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        for work in [call() for call in ((send, receive) if rank % 2 == 0 else (receive, send))]:
            assert work is not None, "this rank is a member"
            work.wait()
    return max(free - torch.cuda.mem_get_info()[0], 0) if on_gpu else 0


def make_context_groups(sizes: Sequence[int], *, timeout: timedelta, for_routers: bool = False) -> ContextGroups:
    """Make the groups of these sizes. Every rank of the world calls it.

    Args:
        sizes: context-parallel sizes of micro-batches, the same on all ranks.
        timeout: of the groups' collectives.
        for_routers: MoE routers sum over the groups.
    """
    from megatron.core import parallel_state

    lane_group: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
    static_group: Any = parallel_state.get_context_parallel_group()
    tensor_group: Any = parallel_state.get_tensor_model_parallel_group()
    leaf, lane = lane_group.rank(), dist.get_process_group_ranks(lane_group)
    static_size, backend = static_group.size(), dist.get_backend(static_group)

    def make(static: dist.ProcessGroup, *, first_of: Sequence[int]) -> dict[int, dist.ProcessGroup]:
        """Groups by size; `first_of[leaf]` is the color of the group that starts at this leaf."""
        by_size = {static_size: static}
        for size in sizes:
            if size == static_size:
                continue
            start = leaf // size * size
            color = first_of[start] if start + size <= len(lane) else None
            group = split_world(color, timeout=timeout, backend=backend)
            if group is not None:
                by_size[size] = group
        return by_size

    by_size = make(static_group, first_of=lane)
    if not for_routers:
        return ContextGroups(by_size, static_size=static_size)
    if tensor_group.size() == 1:
        return ContextGroups(by_size, static_size=static_size, with_tensor=by_size)
    to_first = dist.get_process_group_ranks(tensor_group)[0] - dist.get_rank()
    shared: Any = parallel_state.get_tensor_and_context_parallel_group()
    with_tensor = make(shared, first_of=[rank + to_first for rank in lane])
    return ContextGroups(by_size, static_size=static_size, with_tensor=with_tensor)
