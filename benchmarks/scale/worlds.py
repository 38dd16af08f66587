"""Runs worlds of growing numbers of ranks, and sums up what their ranks wrote."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forked import fork_rank, free_port, rank_environment

from benchmarks.publish import fresh
from benchmarks.scale.rank import RankRun
from benchmarks.scale.stages import STAGES


class RankError(RuntimeError):
    """A rank that ended with an error; the message ends with what it printed last."""


@dataclass(frozen=True)
class World:
    num_ranks: int
    replica_size: int = 1


WORLDS = (
    World(4),
    World(8),
    World(16),
    World(32),
    World(64),
    World(16, replica_size=2),
)


def run_world(world: World, *, num_steps: int, step_seconds: float, lengths_folder: Path | None, out: Path) -> Any:
    """Fork the ranks of a world, wait, and sum up."""
    fresh(out)
    run = RankRun(world.num_ranks, world.replica_size, num_steps, step_seconds, lengths_folder, out)
    port = free_port()
    ranks = {
        fork_rank(
            lambda rank=rank: run.main(rank),
            arguments=["scale"],
            environment=rank_environment(rank, num_ranks=world.num_ranks, port=port),
            log=out / f"rank{rank}.log",
            leave=os._exit,
        ): rank
        for rank in range(world.num_ranks)
    }
    failed = None
    while ranks and failed is None:
        pid, status = os.wait()
        rank = ranks.pop(pid)
        if status:
            failed = rank
    for pid in ranks:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    if failed is not None:
        raise RankError(f"rank {failed} of {world}:\n{(out / f'rank{failed}.log').read_text()[-3000:]}")
    written = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(world.num_ranks)]
    return summary(written, world=world)


def summary(ranks: Sequence[Any], *, world: World) -> dict[str, Any]:
    """Figures of all ranks and steps: seconds by the clock, and CPU seconds, which other ranks do not lengthen."""
    readers = ranks[:: world.replica_size]
    steps = [step for rank in ranks for step in rank["steps"]]
    stages = [step for rank in readers for step in rank["stages"]]
    exposed = [step["exposed_seconds"] for step in steps]
    return {
        "num_ranks": world.num_ranks,
        "replica_size": world.replica_size,
        "dp_size": len(readers),
        "exposed_seconds": {"p50": statistics.median(exposed), "max": max(exposed)},
        "exposed_cpu_seconds": statistics.fmean(step["exposed_cpu_seconds"] for step in steps),
        "cpu_seconds": statistics.fmean(step["cpu_seconds"] for rank in readers for step in rank["steps"]),
        "stages": {
            stage: {
                clock: statistics.fmean(step[stage][index] if stage in step else 0.0 for step in stages)
                for index, clock in enumerate(("seconds", "cpu_seconds"))
            }
            for stage in (*STAGES, "all")
        },
        "sent_nbytes": statistics.fmean(nbytes for rank in readers for nbytes in rank["sent_nbytes"]),
        "num_peers": statistics.fmean(num for rank in readers for num in rank["num_peers"]),
        "groups_seconds": max(rank["groups_seconds"] for rank in ranks),
        "more_sockets": max(rank["more"]["num_sockets"] for rank in ranks),
        "more_anonymous_bytes": statistics.fmean(rank["more"]["anonymous_bytes"] for rank in ranks),
    }
