"""A long run, for leaks of memory, files and threads, compared with a stock run of as many steps.

Trains a tiny model on lengths that drift, on two ranks, balanced by FLOPs with overlap and the record; then the same
without balancing. Fails where a rank gained files or threads, or where memory grew faster than stock's by more than the
limit.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from benchmarks.publish import RAW, Measured, fresh, say, table
from benchmarks.soak import STEPS_PER_SWING
from benchmarks.soak.growth import Growth
from benchmarks.soak.runs import soak

TITLE = "Soak"
SAMPLE_STEPS = 20
MIN_STEPS = 2 * (STEPS_PER_SWING + SAMPLE_STEPS)
"""Growth is of the second half, between samples that are a whole swing of the lengths apart."""

MAX_BYTES_PER_STEP = 100
"""Memory given out by malloc may grow by this much more than stock's: 100 MB in a million steps."""

MAX_RSS_BYTES = 16 * 2**20
"""Resident memory may grow by this much more than stock's in half of the run: malloc's arenas still settle."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=2000, help="steps of each run (default: 2000)")


def measure(args: argparse.Namespace) -> Measured:
    if args.steps < MIN_STEPS:
        raise SystemExit(f"--steps is {args.steps}: it must be at least {MIN_STEPS}, two swings of the lengths")
    folder = fresh(RAW / "soak")
    growth: dict[str, list[dict[str, Any]]] = {}
    samples: dict[str, Any] = {}
    for name in ("balanced", "stock"):
        ranks = soak(folder / name, balanced=name == "balanced", num_steps=args.steps, sample_steps=SAMPLE_STEPS)
        growth[name], samples[name] = [asdict(Growth.of(rank)) for rank in ranks], ranks
        say(f"{name}: {ranks[0][-1]['step']} steps")
    return Measured({"num_steps": args.steps, "growth": growth}, raw=samples, problems=list(_problems(growth)))


def _problems(growth: Mapping[str, list[dict[str, Any]]]) -> Iterator[str]:
    for rank, (balanced, stock) in enumerate(zip(growth["balanced"], growth["stock"], strict=True)):
        for name in ("more_fds", "more_threads"):
            if balanced[name] > 0:
                yield f"rank {rank}: {name} {balanced[name]} in the second half of the run"
        more = balanced["malloc_bytes"]["per_step"] - stock["malloc_bytes"]["per_step"]
        if more > MAX_BYTES_PER_STEP:
            yield f"rank {rank}: malloc gave out {more:.0f} bytes a step more than in the stock run"
        more = balanced["rss_at_end"] - balanced["rss_at_half"] - stock["rss_at_end"] + stock["rss_at_half"]
        if more > MAX_RSS_BYTES:
            yield f"rank {rank}: resident memory grew by {more} bytes more than stock's"


def section(figures: Mapping[str, Any]) -> str:
    rows = [
        (
            name,
            rank,
            *(_slope(rank_growth[figure]) for figure in ("malloc_bytes", "rss_bytes")),
            *(f"{rank_growth[figure] / 2**20:.1f}" for figure in ("rss_at_half", "rss_at_end")),
            _slope(rank_growth["num_blocks"]),
            *(f"{rank_growth[f'num_{kind}']} ({rank_growth[f'more_{kind}']:+d})" for kind in ("fds", "threads")),
        )
        for name, ranks in figures["growth"].items()
        for rank, rank_growth in enumerate(ranks)
    ]
    columns = (
        "run | rank | given out, bytes a step | resident, bytes a step | MiB at half | MiB at end | blocks a step"
        " | open files (more) | threads (more)"
    )
    return f"""{figures["num_steps"]} steps on lengths that drift, two ranks, sampled every {SAMPLE_STEPS} steps after a
collection of garbage. Growth is of the second half of the run: the median slope of pairs of samples that are whole
swings of the
lengths apart, and its quartiles. *Given out*: by malloc and not got back; resident memory holds besides what malloc's
arenas keep. *Blocks*: of Python's allocator.

{table(columns, rows)}"""


def _slope(slope: Mapping[str, float]) -> str:
    return f"{slope['per_step']:.1f} ({slope['low']:.1f} to {slope['high']:.1f})".replace("-0.0", "0.0")
