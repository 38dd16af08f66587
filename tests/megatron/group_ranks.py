"""One rank of a layout: makes Megatron's process groups and then the package's own, and records who is in them.

Nothing is trained. `forked.train` runs it; of Megatron's flags it reads those that say how ranks are grouped.
It reads below the public names, as test_groups.py does.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from megatron_balance.mcore.setup.layout import Layout, make_groups

TIMEOUT = timedelta(seconds=60)


def main() -> None:
    from megatron.core import parallel_state

    folder, *flags = sys.argv[1:]
    parser = argparse.ArgumentParser()
    for name in ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--expert-model-parallel-size", type=int, default=1)
    parser.add_argument("--num-distributed-optimizer-instances", type=int, default=1)
    parser.add_argument("--use-tp-pp-dp-mapping", action="store_true")
    parser.add_argument("--local-world-sizes", type=int, nargs="+", default=[0], help="ranks take them in turn")
    args = vars(parser.parse_known_args(flags)[0])
    order = "tp-cp-ep-pp-dp" if args.pop("use_tp_pp_dp_mapping") else "tp-cp-ep-dp-pp"
    local_world_sizes = args.pop("local_world_sizes")
    os.environ["LOCAL_WORLD_SIZE"] = str(local_world_sizes[int(os.environ["RANK"]) % len(local_world_sizes)])
    dist.init_process_group("gloo", timeout=TIMEOUT)
    parallel_state.initialize_model_parallel(**args, order=order, create_gloo_process_groups=False)

    environment = os.environ
    os.environ = MappingProxyType(environment.copy())  # noqa: B003  # type: ignore[assignment]
    layout = Layout.of_world(timeout=TIMEOUT, on_every_stage=False, on_every_tensor_rank=False)
    of_data = layout.data_group(timeout=TIMEOUT)
    replica = layout.replica(timeout=TIMEOUT)
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
    groups = {"data": of_data, "firsts": replica.firsts, "tensor": replica.tensor, "readers": of_readers}
    groups["later"] = later
    megatron_data: Any = parallel_state.get_data_parallel_group()
    megatron_tensor: Any = parallel_state.get_tensor_model_parallel_group()
    row: dict[str, Any] = {
        "data_rank": parallel_state.get_data_parallel_rank(),
        "tensor_rank": parallel_state.get_tensor_model_parallel_rank(),
        "stage": parallel_state.get_pipeline_model_parallel_rank(),
        "loads": layout.loads_data,
        "leads": layout.is_first_of_replica(),
        "megatron_tensor": dist.get_process_group_ranks(megatron_tensor),
        "megatron_data": dist.get_process_group_ranks(megatron_data),
        "more_sockets": num_more_sockets,
        "ranks_per_node": layout.ranks_per_node,
        **{name: _met(group) for name, group in groups.items()},
    }
    (Path(folder) / f"rank{os.environ['RANK']}.jsonl").write_text(json.dumps(row) + "\n")
    dist.barrier()


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
