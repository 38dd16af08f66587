"""One rank of a layout: makes Megatron's process groups and then the package's own, and records who is in them.

It reads below the public names, as test_groups.py does.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from megatron_balance.mcore.setup.layout import Layout, make_groups

TIMEOUT = timedelta(seconds=60)


def groups_of_rank(
    *, tp: int = 1, pp: int = 1, cp: int = 1, order: str = "tp-cp-ep-dp-pp", local_world_sizes: Sequence[int] = (0,)
) -> dict[str, Any]:
    """Of this rank in a layout; ranks take the local world sizes in turn."""
    from megatron.core import parallel_state

    os.environ["LOCAL_WORLD_SIZE"] = str(local_world_sizes[dist.get_rank() % len(local_world_sizes)])
    parallel_state.initialize_model_parallel(
        tp, pp, context_parallel_size=cp, order=order, create_gloo_process_groups=False
    )

    environment = os.environ
    os.environ = MappingProxyType(environment.copy())  # noqa: B003  # type: ignore[assignment]
    layout = Layout.of_world(timeout=TIMEOUT)
    of_data = layout.data_group(timeout=TIMEOUT, on_every_tensor_rank=False)
    replica = layout.replica_group(timeout=TIMEOUT)
    readers = layout.groups(lambda place: None if place.tp else 0)
    of_readers = make_groups(readers, timeout=TIMEOUT)
    num_sockets = [_num_sockets()]
    for _ in range(4):
        make_groups([range(dist.get_world_size())], timeout=TIMEOUT)
        num_sockets.append(_num_sockets())
    # The least of four: a connection among earlier groups may be accepted late, and be counted here.
    num_more_sockets = min(after - before for before, after in pairwise(num_sockets))
    os.environ = environment  # noqa: B003
    # As Megatron makes its own: a rank that had made fewer groups before would be waited for, or meet others.
    later = dist.new_group([0, dist.get_world_size() - 1], timeout=TIMEOUT)
    groups = {"data": of_data, "replica": replica, "readers": of_readers}
    groups["later"] = later
    megatron_data: Any = parallel_state.get_data_parallel_group()
    return {
        "data_rank": parallel_state.get_data_parallel_rank(),
        "tensor_rank": parallel_state.get_tensor_model_parallel_rank(),
        "stage": parallel_state.get_pipeline_model_parallel_rank(),
        "leads": layout.is_first_of_replica(),
        "megatron_data": dist.get_process_group_ranks(megatron_data),
        "more_sockets": num_more_sockets,
        "ranks_per_node": layout.ranks_per_node,
        **{name: _met(group) for name, group in groups.items()},
    }


def _num_sockets() -> int:
    files = Path("/proc/self/fd")
    return sum(
        os.readlink(files / name).startswith("socket:") for name in os.listdir(files) if (files / name).is_symlink()
    )


def _met(group: Any) -> list[int] | None:
    """Its members, by its own all_gather; None for a rank that is none."""
    if not isinstance(group, dist.ProcessGroup):
        return None
    ranks = torch.empty(group.size(), dtype=torch.int64)
    dist.all_gather_into_tensor(ranks, torch.tensor([dist.get_rank()]), group=group)
    assert dist.get_process_group_ranks(group) == ranks.tolist()
    return ranks.tolist()
