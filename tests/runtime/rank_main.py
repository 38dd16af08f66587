"""One rank of a test world: joins the gloo group, then runs the cases that arrive until none is left."""

from __future__ import annotations

import gc
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection

import device_cases
import exchange_cases
import loop_cases
import torch
import torch.distributed as dist
from cpu_shim import share_gloo_device
from megatron.core import parallel_state
from torch.distributed import distributed_c10d

import megatron_balance.mcore.loop  # noqa: F401  # once, before the ranks are forked

CASES = {**vars(exchange_cases), **vars(loop_cases), **vars(device_cases)}


def serve(rank: int, num_ranks: int, folder: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    share_gloo_device()
    rendezvous = f"file://{folder}/rendezvous"
    timeout = timedelta(minutes=2)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=num_ranks, timeout=timeout)
    while True:
        try:
            case, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = CASES[case](**arguments)
            _destroy_groups()
            connection.send(("done", answer))
        except Exception:  # noqa: BLE001  # reported to the test, which fails
            connection.send(("failed", traceback.format_exc()))


def _destroy_groups() -> None:
    """Ends the groups of a case, whose threads poll: after fifty cases they would be a thousand a rank."""
    dist.barrier()  # no rank needs them any more
    parallel_state.destroy_model_parallel()
    for group in list(distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    gc.collect()
