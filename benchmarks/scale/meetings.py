"""Counts the meetings of real ranks and compares them with the formulas of `traffic.py`.

    python -m benchmarks.scale.meetings                            4, 8 and 16 ranks, a minute
    python -m benchmarks.scale.meetings --out benchmarks/results   what is committed

Ranks are processes of this machine over gloo, without a model: prefetcher, planner, figures and online calibration are
the real ones, with a log interval of one step. Collectives are counted where torch.distributed is called, their bytes
also by the kernel (TCP_INFO of the rank's sockets). The exit status is 1 where a count is not its formula's.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from training_run import ROOT

from benchmarks.markdown import table
from benchmarks.results_file import made_by, page_head, versions_of, write_results
from benchmarks.scale.gloo_world import run_ranks
from benchmarks.scale.meeting_rank import NUM_STEPS, SAMPLES_PER_RANK, World, meet
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


def main() -> int:
    """Count, compare, print, write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale.meetings", description="Counts the meetings of real ranks."
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench", help="folder of the results")
    args = parser.parse_args()
    folder = ROOT / "build" / "bench" / "runs" / "meetings"
    worlds = {
        str(world): run_ranks(world.num_ranks, work=functools.partial(meet, world), out=folder) for world in WORLDS
    }
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
                    f"{_num_collectives(counted['calls']) / NUM_STEPS:.1f}",
                    f"{_num_collectives(counted['in_training']) / NUM_STEPS:.1f}",
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


def _num_collectives(calls: Mapping[str, int]) -> int:
    """Calls but for messages between two ranks."""
    return sum(calls.values()) - calls.get("isend", 0) - calls.get("irecv", 0)


if __name__ == "__main__":
    sys.exit(main())
