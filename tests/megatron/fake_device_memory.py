"""A recorded run whose ranks have devices of 80 GiB: of ten tokens' worth of room, rank 1 has filled more."""

from __future__ import annotations

import os
from types import SimpleNamespace

import torch
from record_steps import main as record

GIB = 2**30


def main() -> None:
    """Train with counters of torch's allocator that are known."""
    rank = int(os.environ["RANK"])
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(total_memory=80 * GIB)
    torch.cuda.memory_allocated = lambda: 12 * GIB
    torch.cuda.max_memory_allocated = lambda: (22 + 10 * rank) * GIB
    torch.cuda.max_memory_reserved = lambda: (30 + 10 * rank) * GIB
    record()
