"""Soak: a long run with everything on, compared with a stock run, and the work that balancing adds to a step.

    scripts/soak.sh --out benchmarks/results

Trains a tiny model on lengths that drift, on two ranks, with look-ahead, overlap, online calibration and the record;
then the same without balancing. Samples memory, open files and threads of every rank. Then trains the quickstart's
model and measures what balancing adds to a step (`overhead.py`). Fails where a rank gained files or threads, where
memory grew faster than stock's by more than the limit, or where balancing added more than its limit.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from training_run import ROOT

from benchmarks.results_file import made_by, write_results
from benchmarks.soak import STEPS_PER_SWING
from benchmarks.soak.growth import Growth
from benchmarks.soak.overhead import LIMIT, measure_overhead
from benchmarks.soak.report import report
from benchmarks.soak.runs import soak

HELD = ("step", "malloc_bytes", "rss_bytes", "num_blocks", "num_fds", "num_threads")
SAMPLE_STEPS = 20
MIN_STEPS = 2 * (STEPS_PER_SWING + SAMPLE_STEPS)
"""Growth is of the second half, between samples that are a whole swing of the lengths apart."""

MAX_BYTES_PER_STEP = 100
"""Memory given out by malloc may grow by this much more than stock's: 100 MB in a million steps."""

MAX_RSS_BYTES = 16 * 2**20
"""Resident memory may grow by this much more than stock's in half of the run: malloc's arenas still settle."""


def main() -> int:
    """Train, print, write; the exit code says whether the limits hold."""
    parser = argparse.ArgumentParser(prog="scripts/soak.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench", help="folder of the results")
    parser.add_argument("--steps", type=int, default=2000, help="steps of each long run (default: 2000)")
    parser.add_argument("--pairs", type=int, default=100, help="pairs of steps for the overhead (default: 100)")
    parser.add_argument("--reuse", action="store_true", help="report the records of the last runs, and do not train")
    args = parser.parse_args()
    if args.steps < MIN_STEPS:
        parser.error(f"--steps is {args.steps}: it must be at least {MIN_STEPS}, two swings of the lengths")
    folder = ROOT / "build" / "bench" / "runs" / "soak"
    if not args.reuse:
        shutil.rmtree(folder, ignore_errors=True)
    runs: dict[str, Any] = {}
    for name in ("balanced", "stock"):
        run = {"num_steps": args.steps, "sample_steps": SAMPLE_STEPS, "reuse": args.reuse}
        ranks = soak(folder / name, balanced=name == "balanced", **run)
        runs[name] = {"ranks": [asdict(Growth.of(rank)) for rank in ranks]}
        runs[name]["samples"] = [[{key: sample[key] for key in HELD} for sample in rank] for rank in ranks]
        sys.stdout.write(f"{name}: {ranks[0][-1]['step']} steps\n")
        sys.stdout.flush()
    overhead = measure_overhead(folder / "overhead", num_pairs=args.pairs, reuse=args.reuse)
    num_steps = runs["balanced"]["samples"][0][-1]["step"]
    result = made_by(
        f"scripts/soak.sh --steps {num_steps} --pairs {overhead['num_pairs']}",
        malloc_arena_max=os.environ.get("MALLOC_ARENA_MAX"),
        num_steps=num_steps,
        runs=runs,
        overhead=overhead,
    )
    problems = list(_problems(result))
    result["problems"] = problems
    text = write_results("soak", result, report=report, out=args.out)
    sys.stdout.write("\n".join([text, *problems]) + "\n")
    return 1 if problems else 0


def _problems(result: dict[str, Any]) -> list[str]:
    problems = []
    ours, stock = (result["runs"][name]["ranks"] for name in ("balanced", "stock"))
    for rank, (mine, theirs) in enumerate(zip(ours, stock, strict=True)):
        for name in ("more_fds", "more_threads"):
            if mine[name] > 0:
                problems.append(f"rank {rank}: {name} {mine[name]} in the second half of the run")
        more = mine["malloc_bytes"]["per_step"] - theirs["malloc_bytes"]["per_step"]
        if more > MAX_BYTES_PER_STEP:
            problems.append(f"rank {rank}: malloc gave out {more:.0f} bytes a step more than in the stock run")
        more = mine["rss_at_end"] - mine["rss_at_half"] - theirs["rss_at_end"] + theirs["rss_at_half"]
        if more > MAX_RSS_BYTES:
            problems.append(f"rank {rank}: resident memory grew by {more} bytes more than stock's")
    added = result["overhead"]["exposed_share"] + result["overhead"]["cpu_share"]
    if added > LIMIT:
        problems.append(f"balancing added {added:.2%} to a step: more than {LIMIT:.0%}")
    return problems


if __name__ == "__main__":
    sys.exit(main())
