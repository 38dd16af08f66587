"""Counts the meetings of real ranks and compares them with the formulas of `traffic.py`.

    python -m benchmarks.scale.meetings                            4, 8 and 16 ranks, a minute
    python -m benchmarks.scale.meetings --out benchmarks/results   what is committed

Ranks are processes of this machine over gloo, without a model: prefetcher, planner, figures and online calibration are
the real ones, with a log interval of one step. Collectives are counted where torch.distributed is called, their bytes
also by the kernel (TCP_INFO of the rank's sockets). The exit status is 1 where a count is not its formula's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from training_run import ROOT

from benchmarks.forked import fork_rank, free_port, rank_environment
from benchmarks.markdown import table
from benchmarks.results_file import made_by, page_head, versions_of, write_results
from benchmarks.scale.meeting_rank import NUM_STEPS, SAMPLES_PER_RANK, TIMEOUT, World, meet
from benchmarks.scale.traffic import Traffic

WORLDS = (World(4, 1), World(8, 1), World(16, 1), World(8, 2), World(16, 4))

TOLERANCE = 0.01
"""Of the bytes that TCP counts: gloo announces a message once more, or once less, where both sides come at once."""


def problems_of(counted: Mapping[str, Any]) -> Iterator[str]:
    """Counts of one rank that differ from the formulas."""
    expected = counted["expected"]
    for name in ("calls", "in_training", "traffic", "sockets"):
        if counted[name] != expected[name]:
            yield f"{name} {counted[name]}, and the formula says {expected[name]}"
    of = Traffic(**counted["traffic"])
    by_formula = of.sent_nbytes + of.frames_sent_nbytes
    if abs(counted["tcp_sent_nbytes"] - by_formula) > TOLERANCE * by_formula:
        yield f"TCP sent {counted['tcp_sent_nbytes']} bytes, and the formula says {by_formula}"


def run_world(world: World, *, out: Path) -> list[dict[str, Any]]:
    """Fork the ranks of a world; what each counted.

    Args:
        world: its ranks.
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
        counted = meet(world)
        (out / f"rank{rank}.json").write_text(json.dumps(counted))
        dist.barrier()
        dist.destroy_process_group()

    ranks = {
        fork_rank(
            lambda rank=rank: main(rank),
            arguments=["meetings"],
            environment=rank_environment(rank, num_ranks=world.num_ranks, port=port),
            log=out / f"rank{rank}.log",
        ): rank
        for rank in range(world.num_ranks)
    }
    failed = []
    for pid, rank in ranks.items():
        if os.waitpid(pid, 0)[1]:
            failed.append(rank)
    if failed:
        raise RuntimeError(f"rank {failed[0]} of {world}:\n{(out / f'rank{failed[0]}.log').read_text()[-3000:]}")
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(world.num_ranks)]


def main() -> int:
    """Count, compare, print, write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale.meetings", description="Counts the meetings of real ranks."
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench", help="folder of the results")
    args = parser.parse_args()
    folder = ROOT / "build" / "bench" / "runs" / "meetings"
    worlds = {str(world): run_world(world, out=folder) for world in WORLDS}
    result = made_by("python -m benchmarks.scale.meetings", worlds=worlds)
    text = write_results("meetings", result, report=_report, out=args.out)
    problems = [
        f"{world}, rank {rank}: {problem}"
        for world, ranks in worlds.items()
        for rank, counted in enumerate(ranks)
        for problem in problems_of(counted)
    ]
    sys.stdout.write("\n".join([text, *problems, ""]))
    return 1 if problems else 0


def _report(result: Mapping[str, Any]) -> str:
    rows: list[tuple[str, ...]] = []
    for world, ranks in result["worlds"].items():
        for name, index in (("first", 0), ("last", len(ranks) - 1)):
            counted = ranks[index]
            of = Traffic(**counted["traffic"])
            rows.append(
                (
                    world,
                    name,
                    f"{sum(counted['calls'].values()) / NUM_STEPS:.1f}",
                    f"{sum(counted['in_training'].values()) / NUM_STEPS:.1f}",
                    f"{of.sent / NUM_STEPS:.1f}",
                    f"{of.sent_nbytes / NUM_STEPS / 1e3:.1f}",
                    f"{counted['tcp_sent_nbytes'] / NUM_STEPS / 1e3:.1f}",
                    f"{counted['sockets']}",
                )
            )
    columns = (
        "layout | rank | collectives | on the training thread | messages sent | payload, kB | by TCP, kB | sockets"
    )
    return f"""{page_head("Meetings", f"{result['command']} --out benchmarks/results")}
Of one rank and step, mean of {NUM_STEPS} steps of {SAMPLES_PER_RANK} samples a rank, figures logged at every step
and two fits of the online calibration among them. On the training thread: once steps are prepared ahead. All other
columns equal the formulas of `benchmarks/scale/traffic.py` on every rank, those by TCP within {TOLERANCE:.0%}, or the
command fails. {versions_of(result)}.

{table(columns, rows)}
"""


if __name__ == "__main__":
    sys.exit(main())
