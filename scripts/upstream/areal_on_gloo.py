"""Runs one of AReaL's scripts for NCCL ranks over gloo on CPU, with the adapter on: `areal_on_gloo.py SCRIPT ARGS`.

AReaL's test reads `all_data`, which the adapter fills with this rank's own alone: the others' are gathered here.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_balance.adapters import areal


def main() -> None:
    # As `python SCRIPT` has them.
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)

    areal.install()
    from areal.infra import dist_rollout
    from areal.infra.platforms import current_platform

    redistribute = dist_rollout.redistribute_trajectories

    def with_all_data(*args: Any, **kwargs: Any) -> Any:
        result = redistribute(*args, **kwargs)
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, result.data)
        for ids, data in zip(result.group_indices, of_ranks, strict=True):
            for index, trajectory in zip(ids, data, strict=True):
                result.all_data[index] = trajectory
        return result

    dist_rollout.redistribute_trajectories = with_all_data

    init_process_group = dist.init_process_group
    dist.init_process_group = lambda backend: init_process_group("gloo")
    current_platform.set_device = lambda index: None
    runpy.run_path(sys.argv[0], run_name="__main__")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
