"""Forks the ranks of a gloo world on this machine and collects what each returns."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked import fork_rank, free_port, rank_environment

from benchmarks.scale.meeting_rank import TIMEOUT


def run_ranks(num_ranks: int, *, work: Callable[[], Any], out: Path) -> list[Any]:
    """Results of the ranks, by rank; it passes through JSON.

    Args:
        num_ranks: of the world.
        work: of each rank, in an initialised world.
        out: folder for what ranks write; emptied.

    Raises:
        RuntimeError: a rank ended with an error.
    """
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    port = free_port()

    def main(rank: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=TIMEOUT)
        result = work()
        (out / f"rank{rank}.json").write_text(json.dumps(result))
        dist.barrier()
        dist.destroy_process_group()

    ranks = {
        fork_rank(
            lambda rank=rank: main(rank),
            arguments=["scale"],
            environment=rank_environment(rank, num_ranks=num_ranks, port=port),
            log=out / f"rank{rank}.log",
        ): rank
        for rank in range(num_ranks)
    }
    failed = []
    for pid, rank in ranks.items():
        if os.waitpid(pid, 0)[1]:
            failed.append(rank)
    if failed:
        log = (out / f"rank{failed[0]}.log").read_text()
        raise RuntimeError(f"rank {failed[0]} of {num_ranks}:\n{log[-3000:]}")
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]
