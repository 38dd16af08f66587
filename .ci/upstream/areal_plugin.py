"""AReaL's own tests with the adapter on, over gloo on CPU: a pytest plugin, and the first module of ranks.

    pytest -p areal_plugin …            from a checkout of AReaL
    torchrun … areal_plugin.py SCRIPT   one of AReaL's scripts for NCCL ranks

AReaL's redistribution test asks for GPUs and starts `torchrun` with NCCL: check.sh puts a `torchrun` on PATH that runs
this file, and the platform claims as many devices as the test asks for. It reads `all_data`, which the adapter fills
with this rank's own alone: the others' are gathered here.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_balance.adapters import areal


def pytest_configure(config: pytest.Config) -> None:
    # Before a test module is collected: some bind _dispatch_tensors and split_and_unpad_tensor by value.
    # The cost is tokens unless MODEL names one: AReaL's assertions are about tokens.
    areal.install(model=os.environ.get("MODEL"))
    from areal.infra.platforms import current_platform

    assert current_platform.device_type == "cpu", "this check is for machines without an accelerator"
    current_platform.device_count = lambda: 8


def main() -> None:
    # As `python SCRIPT` has them.
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)

    areal.install()
    from areal.infra import dist_rollout
    from areal.infra.platforms import current_platform

    redistribute, init_process_group = dist_rollout.redistribute_trajectories, dist.init_process_group

    def with_all_data(*args: Any, **kwargs: Any) -> Any:
        result = redistribute(*args, **kwargs)
        rank_values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(rank_values, result.data)
        for ids, data in zip(result.group_indices, rank_values, strict=True):
            for index, trajectory in zip(ids, data, strict=True):
                result.all_data[index] = trajectory
        return result

    dist_rollout.redistribute_trajectories = with_all_data
    dist.init_process_group = lambda backend: init_process_group("gloo")
    current_platform.set_device = lambda index: None
    runpy.run_path(sys.argv[0], run_name="__main__")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
