"""The coordinates of each rank in Megatron's parallel layout, and this package's process groups over gloo.

Invariant: every rank of the world makes every group of the world, member or not, in one order. torch names a group by
the number of groups that the process has made before, also under `use_local_synchronization`. Ranks that have made
different numbers of them never meet, or meet in the wrong group.
"""

# Megatron types its getters Optional; before training they are not.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroupGloo

from megatron_balance.errors import BalanceError
from megatron_balance.runtime.comm import named_ranks, waiting_for
from megatron_balance.runtime.failure import broadcast_step
from megatron_balance.runtime.process import close_on_undo
from megatron_balance.runtime.rendezvous import Rendezvous, check_settings_match

LAZY_GLOO = "megatron_balance_gloo"
"""Name by which torch knows `_lazy_gloo`."""


class RankCoords(NamedTuple):
    """A rank's numbers along Megatron's axes."""

    tp: int
    cp: int
    pp: int
    dp: int


@dataclass(frozen=True)
class Layout:
    """The coordinates of all ranks by their number in the world; `rank` is this one."""

    rank: int
    coords: Sequence[RankCoords]

    @classmethod
    def from_parallel_state(
        cls, settings: Mapping[str, str], *, timeout: timedelta, error: str | None = None
    ) -> Layout:
        """The layout of Megatron's parallel state; BalanceError on all ranks if one has other settings, or an error."""
        from megatron.core import parallel_state as state

        # A single process, and ranks that are not there, meet nobody.
        if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "fake":
            if error is not None:
                raise BalanceError(error)
            return cls(0, [RankCoords(0, 0, 0, 0)])
        this_rank = RankCoords(
            state.get_tensor_model_parallel_rank(),
            state.get_context_parallel_rank(),
            state.get_pipeline_model_parallel_rank(),
            state.get_data_parallel_rank(),
        )
        # torch has no public name for the store that init_process_group met in.
        store = dist.distributed_c10d._get_default_store()
        world = Rendezvous(store, rank=dist.get_rank(), num_ranks=dist.get_world_size(), timeout=timeout)
        topic = "balance flags and versions"
        texts = check_settings_match(
            settings, rendezvous=world, topic=topic, error=error, payload=json.dumps(this_rank)
        )
        return cls(world.rank, [RankCoords(*json.loads(text)) for text in texts])

    @property
    def this_rank(self) -> RankCoords:
        """The coordinates of this rank."""
        return self.coords[self.rank]

    def leads_replica(self, *, each_cp_rank: bool = False) -> bool:
        """True if this rank represents its model replica, or a context-parallel rank of it."""
        return not (self.this_rank.tp or self.this_rank.pp or (self.this_rank.cp and not each_cp_rank))

    def groups(self, key: Callable[[RankCoords], Hashable | None]) -> list[list[int]]:
        """Ranks with coordinates of equal keys, in one order on every rank; None leaves a rank out."""
        groups: dict[Hashable, list[int]] = {}
        for rank, coords in enumerate(self.coords):
            if (value := key(coords)) is not None:
                groups.setdefault(value, []).append(rank)
        return sorted(groups.values())

    def data_group(self, *, timeout: timedelta, on_every_tensor_rank: bool) -> dist.ProcessGroup | None:
        """A new group of the data-parallel ranks that load data: of a tensor-parallel group all, or the first."""

        def dp_group(coords: RankCoords) -> Hashable | None:
            return (coords.tp, coords.cp, coords.pp) if on_every_tensor_rank or coords.tp == 0 else None

        return make_groups(self.groups(dp_group), timeout=timeout)

    def replica_group(self, *, timeout: timedelta) -> dist.ProcessGroup | None:
        """A new group of the ranks of this model replica; None for one rank."""
        replicas = self.groups(lambda coords: coords.dp)
        group = make_groups([ranks for ranks in replicas if len(ranks) > 1], timeout=timeout)
        # Connects its ranks. In the first step the store may be gone: with a rank of a replica that has failed.
        broadcast_step(str, group=group)
        return group


def make_groups(
    groups: Sequence[Sequence[int]], *, timeout: timedelta, backend: str = "gloo"
) -> dist.ProcessGroup | None:
    """Make disjoint process groups, and return this rank's. Every rank of the world calls it with the same lists."""
    this_group = None
    for ranks in groups:
        with waiting_for(f"world {named_ranks(ranks)} to make a process group"):
            group = dist.new_group(
                list(ranks), backend=_lazy(backend) if backend == "gloo" else backend, timeout=timeout
            )
        if dist.get_rank() in ranks:
            assert isinstance(group, dist.ProcessGroup), "this rank is a member"
            _groups_of_megatron().append(group)
            close_on_undo(functools.partial(_destroy, group))
            this_group = group
    return this_group


def _lazy(backend: str) -> str:
    """The backend whose groups connect two ranks when they first talk, where torch (from 2.8) can.

    Connected at once, 10,000 ranks take hours (docs/scale.md). The user's own TORCH_GLOO_LAZY_INIT holds.
    """
    if _torch_version() < (2, 8) or "TORCH_GLOO_LAZY_INIT" in os.environ:
        return backend
    if not hasattr(dist.Backend, LAZY_GLOO.upper()):
        dist.Backend.register_backend(LAZY_GLOO, _lazy_gloo, extended_api=True, devices=["cpu"])
    return f"cpu:{LAZY_GLOO}"


def _lazy_gloo(opts: Any, backend_options: Any = None) -> ProcessGroupGloo:
    """As torch makes a gloo group, on devices that connect later."""
    gloo: Any = ProcessGroupGloo
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    options = gloo._Options()
    options._devices = [gloo.create_device(interface=name, lazy_init=True) for name in names] or [
        gloo.create_default_device(lazy_init=True)
    ]
    options._threads, options._timeout = 2 * len(options._devices), opts.timeout
    options.global_ranks_in_group, options.group_name = opts.global_ranks_in_group, opts.group_id
    return gloo(opts.store, opts.group_rank, opts.group_size, options)


def _groups_of_megatron() -> list[Any]:
    """All groups that `--distributed-timeout-seconds-after-init` holds for; a list of none where there is no such."""
    from megatron.core import parallel_state

    return getattr(parallel_state, "_global_process_group_list", None) or []


def _destroy(group: dist.ProcessGroup) -> None:
    groups = _groups_of_megatron()
    if group in groups:
        groups.remove(group)
    if dist.is_initialized():  # else it went with all others
        dist.destroy_process_group(group)


def refuse_bound_device() -> None:
    """Refuse device_id before torch 2.15: ranks outside a new gloo group split the NCCL communicator, and hang."""
    waits = dist.is_initialized() and _torch_version() < (2, 15)
    if waits and dist.distributed_c10d._get_default_group().bound_device_id is not None:
        raise BalanceError(
            f"init_process_group was given device_id, and on torch {torch.__version__} ranks would hang creating a "
            "gloo group: leave device_id out (torch.cuda.set_device is enough), or install torch 2.15."
        )


def _torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)
