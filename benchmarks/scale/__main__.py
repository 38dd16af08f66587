"""Measures how a step and the start grow with the number of ranks, and models up to 10,000 of them.

    scripts/bench_scale.sh                             4 to 16 ranks, two minutes
    scripts/bench_scale.sh --whole --out benchmarks/results     what is committed

Ranks are processes of this machine over gloo, with real lengths and no model: a sleep stands for the step. The exit
status is 1 where more of a step than the limit is exposed at 4, 8 or 16 ranks, or modelled at 64, 1,024 or 10,000.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from training_run import ROOT

from benchmarks.planner.setups import find_lengths
from benchmarks.results_file import made_by, write_results
from benchmarks.scale.alone import measure_alone
from benchmarks.scale.growth import WORLDS, run_world
from benchmarks.scale.report import report
from benchmarks.scale.samples import CAP, LENGTH_SET, SAMPLES_PER_RANK, Samples
from benchmarks.scale.simulated import (
    LAYOUTS,
    Network,
    mesh_value_nbytes,
    message_seconds,
    simulate_start,
    simulate_step,
)
from benchmarks.scale.startup import group_seconds, meeting_seconds, mesh, store_seconds

EXPOSED_LIMIT = 0.005
"""Share of a step that may be exposed."""

MESH_RANKS = (4, 8, 16)
WORSE = 4
JUDGED = (4, 8, 16)
ALONE_STEPS = 6
PARTS = ("worlds", "startup", "alone")


def main() -> int:
    """Measure, model, print, write."""
    parser = argparse.ArgumentParser(prog="scripts/bench_scale.sh", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench", help="folder of the results")
    parser.add_argument("--whole", action="store_true", help="up to 64 ranks, and models of up to 10,000")
    parser.add_argument(
        "--parts", nargs="*", default=PARTS, choices=PARTS, help="to measure; others are kept from --out"
    )
    parser.add_argument("--steps", type=int, default=8, help="measured steps of a world (default: 8)")
    parser.add_argument("--step-seconds", type=float, default=5.0, help="of the sleep in a step (default: 5)")
    parser.add_argument("--lengths", type=Path, default=None, help="folder of real length sets")
    args = parser.parse_args()
    lengths = None if args.lengths is None else find_lengths(args.lengths)
    known = args.out / "scale.json"
    kept = json.loads(known.read_text()) if set(args.parts) < set(PARTS) else {}
    result = measure(args, kept=kept, lengths_folder=lengths)
    text = write_results("scale", result, report=report, out=args.out)
    problems = list(_problems(result))
    sys.stdout.write("\n".join([text, *problems]) + "\n")
    return 1 if problems else 0


def measure(args: argparse.Namespace, *, kept: Mapping[str, Any], lengths_folder: Path | None) -> dict[str, Any]:
    """All figures: those of the parts asked for, the others as they were; and what follows from them."""
    measured: dict[str, Any] = {part: kept.get(part) for part in PARTS}
    if "worlds" in args.parts:
        measured["worlds"] = list(_worlds(args, lengths_folder=lengths_folder))
    if "startup" in args.parts:
        measured["startup"] = _startup()
    if "alone" in args.parts:
        torch.set_num_threads(1)
        measured["alone"] = [
            measure_alone(Samples(dp_size, ALONE_STEPS, lengths_folder).lengths())
            for dp_size in sorted({layout.dp_size for layout in LAYOUTS})
        ]
    measured["message_seconds"] = message_seconds(measured["worlds"])
    measured["exposed_cpu_seconds"] = measured["worlds"][0]["exposed_cpu_seconds"]
    whole = " --whole" if args.whole else ""
    return made_by(
        f"scripts/bench_scale.sh{whole} --steps {args.steps} --step-seconds {args.step_seconds:g}",
        cores=len(os.sched_getaffinity(0)),
        lengths={"name": LENGTH_SET, "real": lengths_folder is not None, "cap": CAP, "per_rank": SAMPLES_PER_RANK},
        step_seconds=args.step_seconds,
        **measured,
        simulated=list(_simulated(measured, step_seconds=args.step_seconds)),
    )


def _worlds(args: argparse.Namespace, *, lengths_folder: Path | None) -> Iterator[dict[str, Any]]:
    import megatron.core.parallel_state  # noqa: F401 - before ranks are forked, which would each import it

    for world in WORLDS:
        if args.whole or world.num_ranks <= max(JUDGED):
            run = {"num_steps": args.steps, "step_seconds": args.step_seconds, "lengths_folder": lengths_folder}
            yield run_world(world, out=ROOT / "build" / "bench" / "runs" / "scale", **run)
            sys.stdout.write(f"{world}: done\n")
            sys.stdout.flush()


def _startup() -> dict[str, Any]:
    sizes = sorted({200, 2_000, 100_000, *(mesh_value_nbytes(layout.dp_size) for layout in LAYOUTS)})
    return {
        "meetings": {str(ranks): meeting_seconds(ranks) for ranks in sorted({one.num_ranks for one in LAYOUTS})},
        "store_seconds": {str(size): store_seconds(size) for size in sizes},
        "group_seconds": group_seconds(max(layout.num_ranks for layout in LAYOUTS)),
        "meshes": [
            {"num_ranks": ranks, "lazy": lazy} | mesh(ranks, lazy=lazy)
            for ranks in MESH_RANKS
            for lazy in (False, True)
        ],
    }


def _simulated(measured: dict[str, Any], *, step_seconds: float) -> Iterator[dict[str, Any]]:
    for layout in LAYOUTS:
        steps = {
            name: simulate_step(layout, measured=measured, network=network, step_seconds=step_seconds)
            for name, network in (("step", Network()), ("worse", Network().worse(WORSE)))
        }
        start = simulate_start(layout, measured=measured, step_seconds=step_seconds)
        yield {
            "num_ranks": layout.num_ranks,
            "parallelism": layout.name,
            "dp_size": layout.dp_size,
            **steps,
            "start": start,
        }


def _problems(result: dict[str, Any]) -> Iterator[str]:
    for world in result["worlds"]:
        share = world["exposed_seconds"]["p50"] / result["step_seconds"]
        if world["num_ranks"] in JUDGED and share > EXPOSED_LIMIT:
            yield f"{world['num_ranks']} ranks: {share:.2%} of a step is exposed, more than {EXPOSED_LIMIT:.1%}"
    for one in result["simulated"]:
        if one["step"]["exposed_share"] > EXPOSED_LIMIT:
            yield f"{one['num_ranks']} ranks, modelled: {one['step']['exposed_share']:.2%} of a step is exposed"


if __name__ == "__main__":
    sys.exit(main())
