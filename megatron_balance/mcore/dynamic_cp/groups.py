"""The context-parallel groups that micro-batches of different sizes run in.

The ranks of one tensor-parallel rank and pipeline stage are a *lane* of `dp_size * cp_size` *leaves*, in the order of
Megatron's data-parallel group with context parallelism: context-parallel ranks innermost. A group of `size` leaves
starts at a multiple of `size`.

Invariant: all ranks of the world make all groups, in one order (`setup/groups.py`), before training. Megatron's own
context-parallel group serves its size; no group is shared with the gradient reduction.
"""

# Megatron types its getters Optional; before training they are not.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_balance.mcore.setup.groups import split_world


@dataclass(frozen=True)
class ContextGroups:
    """The groups of this rank.

    Attributes:
        by_size: group of each size; a rank whose leaf is in no whole group of a size lacks that size.
        static_size: `--context-parallel-size`, which evaluation runs at.
    """

    by_size: Mapping[int, dist.ProcessGroup]
    static_size: int

    def of_size(self, size: int) -> dist.ProcessGroup:
        """The group of `size` ranks that this rank is in."""
        return self.by_size[size]

    def of_attention(self, size: int) -> dist.ProcessGroup | None:
        """The same, None for one rank: attention then exchanges nothing."""
        return None if size == 1 else self.by_size[size]


def make_context_groups(sizes: Sequence[int], *, timeout: timedelta) -> ContextGroups:
    """Make the groups of these sizes. Every rank of the world calls it.

    Args:
        sizes: that micro-batches may have, the same on all ranks.
        timeout: of the groups' collectives.
    """
    from megatron.core import parallel_state

    lane_group: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
    static_group: Any = parallel_state.get_context_parallel_group()
    leaf, lane = lane_group.rank(), dist.get_process_group_ranks(lane_group)
    backend = dist.get_backend(static_group)
    by_size: dict[int, dist.ProcessGroup] = {static_group.size(): static_group}
    for size in sizes:
        if size == static_group.size():
            continue
        start = leaf // size * size
        color = lane[start] if start + size <= len(lane) else None
        group = split_world(color, timeout=timeout, backend=backend)
        if group is not None:
            by_size[size] = group
    return ContextGroups(by_size, static_size=static_group.size())
