"""A mismatch that must be caught: ranks that call one collective with different shapes."""

from __future__ import annotations

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    share = torch.zeros(4 + dist.get_rank())
    dist.all_gather_into_tensor(torch.empty(dist.get_world_size() * len(share)), share)
