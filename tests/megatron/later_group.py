"""Trains as record_steps.py does, and makes a process group in the second step, as Megatron may at any time."""

from __future__ import annotations

import functools
import json
from typing import Any, TextIO

import torch
import torch.distributed as dist
from record_steps import train_wrapped

from megatron_balance.hooking import Function


def main() -> None:
    train_wrapped(_with_a_later_group, why="has all ranks of the world make one more process group")


def _with_a_later_group(train_step: Function, *, out: TextIO) -> Function:
    num_steps = 0

    @functools.wraps(train_step)
    def wrapper(*positional: Any, **keywords: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 2:
            ranks = torch.empty(dist.get_world_size(), dtype=torch.int64)
            dist.all_gather_into_tensor(ranks, torch.tensor([dist.get_rank()]), group=dist.new_group())
            print(json.dumps({"ranks_met": ranks.tolist()}), file=out, flush=True)
        return train_step(*positional, **keywords)

    return wrapper
