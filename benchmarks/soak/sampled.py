"""Trains on drifting lengths and samples the resources of the process: run by runs.py.

    torchrun … tests/kit/cpu_shim.py benchmarks/soak/sampled.py RECORD_DIR ARGS

Each rank writes RECORD_DIR/rankN.jsonl, a line every SOAK_SAMPLE_STEPS (20) steps, after a collection of garbage:
resident bytes, bytes that malloc has given out, open files, threads, blocks of Python's allocator, and loss and seconds
of the newest step.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import pretrain_sft
from record_steps import Function, train_wrapped

from benchmarks.soak.drifting import datasets_provider
from megatron_balance.mcore.run import current

SAMPLE_STEPS = int(os.environ.get("SOAK_SAMPLE_STEPS", "20"))


def main() -> None:
    pretrain_sft.datasets_provider = datasets_provider  # lengths that drift
    train_wrapped(_sampled)


def _sampled(train_step: Function, *, out: TextIO) -> Function:
    steps = itertools.count(1)

    @functools.wraps(train_step)
    def wrapper(*positional: Any, **keywords: Any) -> Any:
        began, cpu_began = time.perf_counter(), time.process_time()
        result = train_step(*positional, **keywords)
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
        step = next(steps)
        if step % SAMPLE_STEPS == 0:
            row = {"step": step, **resources(), "seconds": seconds, "cpu_seconds": cpu_seconds, **_balanced()}
            print(json.dumps(row | {"lm_loss": float(result[0]["lm loss"])}), file=out, flush=True)
        return result

    return wrapper


class MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    NAMES = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = tuple((name, ctypes.c_size_t) for name in NAMES)


def malloc_bytes() -> int:
    """Bytes that malloc has given out and not got back, over all arenas; what it keeps for later is not in it."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = MallInfo
    info = mallinfo2()
    return info.uordblks + info.hblkhd


def resources() -> dict[str, int]:
    """Memory, files and threads of this process; Linux only."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "rss_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "malloc_bytes": malloc_bytes(),
        # The listing has a descriptor of its own.
        "num_fds": len(os.listdir("/proc/self/fd")) - 1,
        "num_threads": len(os.listdir("/proc/self/task")),
        # Counts every Python object below 512 bytes: a leak of one small object a step shows.
        "num_blocks": sys.getallocatedblocks(),
    }


def _balanced() -> dict[str, Any]:
    balanced = current()
    if balanced is None or balanced.last_step is None:
        return {"balanced": False}
    step = balanced.last_step
    plan = {"num_microbatches": step.num_microbatches, "exposed_seconds": step.exposed_seconds}
    return {"balanced": True, **plan}


if __name__ == "__main__":
    main()
