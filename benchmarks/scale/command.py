"""Growth of a step with the number of ranks, and of a plan: what balancing exposes, sends and computes.

Worlds of 4 to 16 gloo ranks (64 with `--whole`) run the real prefetcher, planner and exchange on this machine, with
real lengths and a sleep in place of the step. One rank alone then does the work of a step of up to 10,000 ranks, with
collectives that answer at once. Plans are those of up to 8,192 data-parallel ranks.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.planner.setups import add_length_options, lengths_folder, lengths_said
from benchmarks.publish import RAW, Measured, made_by, published, say, table
from benchmarks.scale.alone import measure_alone
from benchmarks.scale.plans import SAMPLES_PER_RANK as PLANNED_PER_RANK
from benchmarks.scale.plans import SIZES, measure_plans
from benchmarks.scale.samples import CAP, LENGTH_SET, SAMPLES_PER_RANK, Samples
from benchmarks.scale.worlds import WORLDS, run_world

TITLE = "Scale"
EXPOSED_LIMIT = 0.005
"""Share of a step that may be exposed."""

ALONE = (8, 64, 128, 1024, 10_000)
ALONE_STEPS = 6
PARTS = ("plans", "alone", "worlds")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS, help="to measure; others stay published")
    parser.add_argument("--whole", action="store_true", help="worlds of up to 64 ranks")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of a world (default: 8)")
    parser.add_argument("--step-seconds", type=float, default=5.0, help="of the sleep in a step (default: 5)")
    add_length_options(parser)


def measure(args: argparse.Namespace) -> Measured:
    """Measures the parts that are asked for; the others stay as they are published."""
    folder = lengths_folder(args)
    known = published("scale")
    figures: dict[str, Any] = {part: known[part] for part in (*PARTS, "plans_made") if part in known}
    if "worlds" in args.parts:
        figures["worlds"] = list(_worlds(args, folder=folder))
    if "alone" in args.parts:
        torch.set_num_threads(1)
        figures["alone"] = [measure_alone(Samples(size, ALONE_STEPS, folder).lengths()) for size in ALONE]
    if "plans" in args.parts:
        figures["plans_made"] = made_by("python -m benchmarks scale --parts plans")
        figures["plans"] = [asdict(each) for each in measure_plans(SIZES, folder=folder)]
    if "made" in known and len(args.parts) < len(PARTS):  # of the parts that stay
        figures["made"] = known["made"]
    figures |= {
        "step_seconds": args.step_seconds,
        "cores": len(os.sched_getaffinity(0)),
        "lengths": lengths_said(folder),
    }
    return Measured(figures, problems=list(_problems(figures)))


def _worlds(args: argparse.Namespace, *, folder: Path | None) -> Iterator[dict[str, Any]]:
    import megatron.core.parallel_state  # noqa: F401 - before ranks are forked, which would each import it

    for world in WORLDS:
        if args.whole or world.num_ranks <= 16:
            run = {"num_steps": args.steps, "step_seconds": args.step_seconds, "lengths_folder": folder}
            yield run_world(world, out=RAW / "scale", **run)
            say(f"{world}: done")


def _problems(figures: Mapping[str, Any]) -> Iterator[str]:
    for world in figures.get("worlds", ()):
        share = world["exposed_seconds"]["p50"] / figures["step_seconds"]
        if world["num_ranks"] <= 16 and share > EXPOSED_LIMIT:
            yield f"{world['num_ranks']} ranks: {share:.2%} of a step is exposed, more than {EXPOSED_LIMIT:.1%}"


def section(figures: Mapping[str, Any]) -> str:
    parts = {"worlds": _worlds_text, "alone": _alone_text, "plans": _plans_text}
    return "\n\n".join(write(figures) for part, write in parts.items() if part in figures)


def _worlds_text(figures: Mapping[str, Any]) -> str:
    rows = [
        f"{world['num_ranks']} | {world['replica_size']} | {1e3 * world['exposed_seconds']['p50']:.2g}"
        f" | {world['exposed_seconds']['p50'] / figures['step_seconds']:.3%} | {1e3 * world['exposed_cpu_seconds']:.2f}"
        f" | {1e3 * world['stages']['all']['cpu_seconds']:.1f} | {1e3 * world['cpu_seconds']:.0f}"
        f" | {world['sent_nbytes'] / 1024:.0f} | {world['num_peers']:.1f} | {world['more_sockets']}"
        f" | {world['more_anonymous_bytes'] / 2**20:.1f} | {world['groups_seconds']:.2f}"
        for world in figures["worlds"]
    ]
    columns = (
        "ranks | of a replica | exposed ms | of a step | exposed CPU ms | thread CPU ms | process CPU ms | KiB sent"
        " | to ranks | more sockets | more MiB | groups made, s"
    )
    return f"""### Measured

Every rank is a process, all on {figures["cores"]} cores; {SAMPLES_PER_RANK} samples a rank and step of {LENGTH_SET}, at
most {CAP} tokens each; a step is a sleep of {figures["step_seconds"]:g} s. *Exposed*: the step waits for its data,
median.
*Thread*: prepares the next step. Ranks that share cores wait for them, so CPU times are the figures to look at. In rows
of two a replica every second rank reads no data.

{table(columns, rows, align="r" * 12)}"""


def _alone_text(figures: Mapping[str, Any]) -> str:
    known = ("gather", "compare", "write", "exchange", "pack", "agree", "split")
    stages = [stage for stage in known if all(stage in figure["cpu_seconds"] for figure in figures["alone"])]
    rows = [
        (
            f"{figure['num_ranks']:,}",
            _milliseconds(figure["plan_seconds"]),
            *(_milliseconds(figure["cpu_seconds"][stage]) for stage in stages),
            f"{figure['sent_nbytes'] / 1024:.0f}",
            f"{figure['num_peers']:.0f}",
        )
        for figure in figures["alone"]
    ]
    columns = " | ".join(
        ["data-parallel ranks", "plan ms", *(f"{stage} CPU ms" for stage in stages), "KiB sent", "to ranks"]
    )
    return f"""### One rank alone

The work of one rank for a step at the true size, the answers of the others put in place of gloo's. The plan by the
clock, the least of {ALONE_STEPS - 1} steps.

{table(columns, rows, align="r" * 11)}"""


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}" if seconds >= 0.01 else f"{1e3 * seconds:.2g}"


def _plans_text(figures: Mapping[str, Any]) -> str:
    cells: dict[int, dict[str, str]] = {}
    for row in figures["plans"]:
        kind = f"{'dense' if row['ep_size'] == 1 else 'EP{}'.format(row['ep_size'])}, PP{row['pp_size']}"
        cells.setdefault(row["dp_size"], {})[kind] = f"{row['cpu_ms']:.0f} ({row['over_bound']:.4f})"
    kinds, made = list(next(iter(cells.values()))), figures["plans_made"]
    rows = [[f"{size:,}", *plan_cells.values()] for size, plan_cells in cells.items()]
    return f"""### Plans at scale

CPU milliseconds of a plan, and its predicted time over the bound: {PLANNED_PER_RANK} samples a rank, 16,384 tokens a
micro-batch, Qwen3-8B or Qwen3-30B-A3B; {figures["lengths"]}; {made["date"]}, revision {made["revision"]}. The bound of
a pipeline counts a bubble of empty micro-batches only: no plan with experts comes near it.

{table(" | ".join(["data-parallel ranks", *kinds]), rows, align="r" * (len(kinds) + 1))}"""
