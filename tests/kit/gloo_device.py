"""One gloo device for all groups of a process: each device is a thread that polls a hundred times a second."""

from __future__ import annotations

import functools
from typing import Any

from torch.distributed import ProcessGroupGloo, distributed_c10d


@functools.cache
def share_gloo_device() -> None:
    """Let every group made from now on use one device. Fifty groups on eight ranks took a third of a core, idle."""
    if not hasattr(distributed_c10d, "_create_gloo_process_group"):  # torch before 2.13
        return
    device = functools.cache(ProcessGroupGloo.create_default_device)

    def create(group: Any, _options: object) -> ProcessGroupGloo:
        options = ProcessGroupGloo._Options()
        options._devices, options._threads, options._timeout = [device()], 2, group.timeout
        options.global_ranks_in_group, options.group_name = group.global_ranks_in_group, group.group_id
        return ProcessGroupGloo(group.store, group.group_rank, group.group_size, options)

    distributed_c10d._create_gloo_process_group = create  # before the first group registers it
