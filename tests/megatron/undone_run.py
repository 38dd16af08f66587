"""One rank that trains as record_steps.py does, undoes the hooks, and records what this process still has of them."""

import gc
import json
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import record_steps
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.attention import Attention
from megatron.training import training

from megatron_balance.mcore import install


def main():
    folder = Path(sys.argv[1])
    record_steps.main()
    trained = _left()
    before = [item for item in gc.get_objects() if isinstance(item, ThreadPoolExecutor)]  # else the collector ends them
    install().undo()
    row = {"trained": trained, "undone": _left()}
    (folder / f"rank{os.environ['RANK']}.jsonl").write_text(json.dumps(row) + "\n")
    dist.barrier()
    del before


def _left():
    functions = training.get_forward_backward_func, training.evaluate, Attention.forward
    groups = parallel_state._global_process_group_list or []
    return {
        "threads": sum(thread.name.startswith("megatron_balance") for thread in threading.enumerate()),
        "processes": len(_children()),
        "groups": len(groups) + len(dist.distributed_c10d._world.pg_map),
        "wrapped": sum("megatron_balance" in function.__code__.co_filename for function in functions),
    }


def _children():
    """Processes that this one has started and that run."""
    names = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it has ended since
            continue
        if int(parent) == os.getpid() and state != "Z":
            names.append(int(stat.parent.name))
    return names
