"""This rank's place in Megatron's parallel layout, and process groups that are the package's own.

A group of our own: a thread may use it while training uses Megatron's, and no GPU waits for it (gloo).
"""

# Megatron types its getters Optional; before training they are not.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_balance.runtime.agreement import Meeting
from megatron_balance.runtime.peers import named_ranks, waiting_for


def own_group(group: dist.ProcessGroup, *, timeout: timedelta) -> dist.ProcessGroup:
    """The same ranks once more."""
    return new_group(dist.get_process_group_ranks(group), timeout=timeout)


def new_group(ranks: Sequence[int], *, timeout: timedelta) -> dist.ProcessGroup:
    """A group that its ranks make, this one among them; all of them make their groups in one order.

    Args:
        ranks: of the world.
        timeout: of its collectives.
    """
    with waiting_for(f"world {named_ranks(list(ranks))} to make a process group"):
        own = dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True, timeout=timeout)
    assert isinstance(own, dist.ProcessGroup), "this rank is in its own group"
    _follow_later_timeouts(own)
    return own


def _follow_later_timeouts(group: dist.ProcessGroup) -> None:
    """Have `--distributed-timeout-seconds-after-init` hold for this group too: Megatron keeps a list of its groups."""
    from megatron.core import parallel_state

    groups = getattr(parallel_state, "_global_process_group_list", None)
    if isinstance(groups, list):
        groups.append(group)


def meeting_of_world(*, timeout: timedelta) -> Meeting | None:
    """Where all ranks of the world can agree without a group; None where this process is alone.

    Args:
        timeout: after which a rank that has not come is named.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return None
    # torch has no public name for the store that init_process_group met in.
    store = dist.distributed_c10d._get_default_store()
    return Meeting(store, rank=dist.get_rank(), num_ranks=dist.get_world_size(), timeout=timeout)


def reads_data() -> bool:
    """Whether this rank is the first of its tensor-parallel group."""
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_rank() == 0


def replica_ranks() -> list[int]:
    """World ranks of this model replica: tensor-, pipeline- and context-parallel ranks, the first one first.

    Megatron's ranks are a grid, numbered along its axes in some order; so the way from this rank to another one is the
    sum of the ways along each axis.
    """
    from megatron.core import parallel_state

    model_group: Any = parallel_state.get_model_parallel_group()
    context_group: Any = parallel_state.get_context_parallel_group()
    stages, shares = map(dist.get_process_group_ranks, (model_group, context_group))
    here = dist.get_rank()
    return sorted(stage + share - here for stage in stages for share in shares)


def is_first_of_replica() -> bool:
    """Whether this rank is the one rank that stands for its model replica."""
    from megatron.core import parallel_state

    return not any(
        (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_context_parallel_rank(),
        )
    )
