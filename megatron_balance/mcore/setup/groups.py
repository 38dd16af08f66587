"""Makes the package's own process groups, from this rank's place in Megatron's parallel layout.

They are separate from Megatron's: a thread may use them while training uses Megatron's, and no GPU waits (gloo).

Invariant: every rank of the world makes every group of the world, its own or not, in one order. torch names a group by
the number of groups that the process has made before, also under `use_local_synchronization`. Ranks that have made
different numbers of them never meet, or meet in the wrong group. Each rank knows only its own Megatron groups, so ranks
exchange them first; this works for any order of ranks.
"""

# Megatron types its getters Optional; before training they are not.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_balance.runtime.agreement import Meeting, gather_texts
from megatron_balance.runtime.nodes import local_world_size, members_per_node
from megatron_balance.runtime.peers import named_ranks, waiting_for
from megatron_balance.runtime.replica import Replica
from megatron_balance.runtime.resources import close_on_undo

_LAZY = "TORCH_GLOO_LAZY_INIT"
"""Read by torch (from 2.8) whenever it makes a gloo group."""


def data_group(*, timeout: timedelta, loads: bool) -> dist.ProcessGroup | None:
    """This rank's data-parallel ranks in a new group; None where it loads no data. Every rank of the world calls it.

    Args:
        timeout: of its collectives.
        loads: this rank loads data; the same on all of its data-parallel ranks.
    """
    from megatron.core import parallel_state

    of_data: Any = parallel_state.get_data_parallel_group()
    ranks = dist.get_process_group_ranks(of_data)
    return _group_of(ranks if loads else [], timeout=timeout)


def replica_groups(*, timeout: timedelta, tensor_ranks_load: bool = False) -> Replica:
    """The ranks of this model replica, in groups of their own. Every rank of the world calls it.

    Args:
        timeout: of their collectives.
        tensor_ranks_load: each tensor-parallel rank may have data of its own; then all ranks are one group.
    """
    from megatron.core import parallel_state

    of_tensor: Any = parallel_state.get_tensor_model_parallel_group()
    tensor = dist.get_process_group_ranks(of_tensor)
    firsts = ranks_of_tensor_rank()
    if tensor_ranks_load:
        of_model: Any = parallel_state.get_model_parallel_group()
        firsts, tensor = _grid(of_model, parallel_state.get_context_parallel_group()), tensor[:1]
    takes_part = tensor_ranks_load or is_first_of_tensor_group()
    return Replica(
        firsts=_group_of(firsts if takes_part else [], timeout=timeout) if len(firsts) > 1 else None,
        tensor=_group_of(tensor, timeout=timeout) if len(tensor) > 1 else None,
    )


def _group_of(ranks: list[int], *, timeout: timedelta) -> dist.ProcessGroup | None:
    own = split_world(min(ranks, default=None), timeout=timeout)
    assert own is None or dist.get_process_group_ranks(own) == sorted(ranks), "Megatron's ranks agree on their groups"
    return own


def split_world(color: int | None, *, timeout: timedelta, backend: str = "gloo") -> dist.ProcessGroup | None:
    """The ranks of the world that have this rank's color, as MPI_Comm_split does. Every rank of the world calls it.

    Args:
        color: any number; None to be in no group.
        timeout: of the group's collectives.
        backend: of the group.

    Returns:
        A group of this rank, or None where it has no color.

    Raises:
        BalanceError: on every rank: a rank did not take part. PeerError where it did not make its group.
    """
    own = None
    for ranks in ranks_by_color(color, timeout=timeout):
        with waiting_for(f"world {named_ranks(ranks)} to make a process group"), _connected_when_they_meet():
            group = dist.new_group(ranks, backend=backend, timeout=timeout)
        if dist.get_rank() in ranks:
            assert isinstance(group, dist.ProcessGroup), "this rank is a member"
            _follow_later_timeouts(group)
            close_on_undo(functools.partial(_destroy, group))
            own = group
    return own


@contextlib.contextmanager
def _connected_when_they_meet() -> Iterator[None]:
    """Have gloo connect two ranks of a group when they first talk; the user's own TORCH_GLOO_LAZY_INIT holds.

    Connected at once, each rank reads from the store where every other one listens, and 8 bytes a member each time:
    at 10,000 ranks this takes hours (docs/scale.md).
    """
    if _LAZY in os.environ:
        yield
        return
    os.environ[_LAZY] = "1"
    try:
        yield
    finally:
        del os.environ[_LAZY]


def ranks_by_color(color: int | None, *, timeout: timedelta) -> list[list[int]]:
    """For each color its ranks, colors in ascending order; arguments and errors as for `split_world`."""
    meeting = meeting_of_world(timeout=timeout)
    texts = [json.dumps(color)]
    if meeting is not None:
        texts = gather_texts(texts[0], meeting=meeting, topic="process groups")
    colors = [json.loads(text) for text in texts]
    return [[rank for rank, other in enumerate(colors) if other == one] for one in sorted({*colors} - {None})]


def _follow_later_timeouts(group: dist.ProcessGroup) -> None:
    """Have `--distributed-timeout-seconds-after-init` hold for this group too: Megatron keeps a list of its groups."""
    from megatron.core import parallel_state

    groups = getattr(parallel_state, "_global_process_group_list", None)
    if isinstance(groups, list):
        groups.append(group)


def _destroy(group: dist.ProcessGroup) -> None:
    from megatron.core import parallel_state

    groups = getattr(parallel_state, "_global_process_group_list", None)
    if isinstance(groups, list) and group in groups:
        groups.remove(group)
    if dist.is_initialized():  # else it went with all others
        dist.destroy_process_group(group)


def meeting_of_world(*, timeout: timedelta) -> Meeting | None:
    """The store and ranks by which all ranks of the world agree without a group; None in a single process.

    Args:
        timeout: after which missing ranks are named.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return None
    # torch has no public name for the store that init_process_group met in.
    store = dist.distributed_c10d._get_default_store()
    return Meeting(store, rank=dist.get_rank(), num_ranks=dist.get_world_size(), timeout=timeout)


def problem_of_bound_device() -> str | None:
    """The reason why no gloo group can be made, or None.

    Before torch 2.15 the ranks that are not in a new group split the NCCL communicator of a default group that is bound
    to a device, for a gloo group too, of which no member does: they wait for each other without end.
    """
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version >= (2, 15) or not dist.is_initialized():
        return None
    if dist.distributed_c10d._get_default_group().bound_device_id is None:
        return None
    return (
        f"init_process_group was given device_id, and on torch {torch.__version__} ranks would wait without end for a "
        "gloo group: leave device_id out (torch.cuda.set_device is enough), or install torch 2.15."
    )


def dp_ranks_per_node(*, timeout: timedelta) -> int | None:
    """Data-parallel ranks of one node, the same on every rank; None where nodes do not matter or are not known.

    Every rank of the world calls it.
    """
    from megatron.core import parallel_state

    here = local_world_size()
    group: Any = parallel_state.get_data_parallel_group()
    ranks = dist.get_process_group_ranks(group)
    own = members_per_node(ranks, ranks_per_node=here)
    meeting = meeting_of_world(timeout=timeout)
    if meeting is None:
        return own
    texts = gather_texts(json.dumps([here, own]), meeting=meeting, topic="the ranks of each node")
    return own if len({*texts}) == 1 else None


def is_first_of_tensor_group() -> bool:
    """True if this rank is the first of its tensor-parallel group: it reads micro-batches, and is measured."""
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_rank() == 0


def loads_data(*, on_every_stage: bool, on_every_tensor_rank: bool = False) -> bool:
    """True if this rank loads and exchanges samples.

    Args:
        on_every_stage: False where stages between the first and the last of a pipeline load nothing.
        on_every_tensor_rank: False where only the first rank of a tensor-parallel group does.
    """
    from megatron.core import parallel_state

    if not (on_every_tensor_rank or is_first_of_tensor_group()):
        return False
    last = parallel_state.get_pipeline_model_parallel_world_size() - 1
    return on_every_stage or parallel_state.get_pipeline_model_parallel_rank() in (0, last)


def ranks_of_tensor_rank() -> list[int]:
    """World ranks of this model replica that have this rank's tensor-parallel rank, the replica's first stage first.

    They are its pipeline- and context-parallel ranks.
    """
    from megatron.core import parallel_state

    return _grid(parallel_state.get_pipeline_model_parallel_group(), parallel_state.get_context_parallel_group())


def _grid(stages: Any, shares: Any) -> list[int]:
    """World ranks of the plane that two groups of this rank span.

    Megatron's ranks are a grid, numbered along its axes in some order. So the difference between two ranks is the sum
    of their differences along each axis.
    """
    here = dist.get_rank()
    of_stages, of_shares = map(dist.get_process_group_ranks, (stages, shares))
    return sorted(stage + share - here for stage in of_stages for share in of_shares)


def is_first_of_replica(*, of_leaf: bool = False) -> bool:
    """True if this rank represents its model replica, or a context-parallel rank of it."""
    from megatron.core import parallel_state

    return not any(
        (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
            0 if of_leaf else parallel_state.get_context_parallel_rank(),
        )
    )
