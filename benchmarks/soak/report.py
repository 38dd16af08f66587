"""Writes the page of a soak."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import table
from benchmarks.results_file import page_head, versions_of
from benchmarks.soak.overhead import LIMIT

_GROWTH = (
    "run | rank | given out, bytes a step | resident, bytes a step | MiB at half | MiB at end | blocks a step | "
    "open files (more) | threads (more)"
)
_SHARE = "step, CPU seconds | work, CPU ms | share | waited, ms | share of seconds"


def report(result: dict[str, Any]) -> str:
    """The page."""
    hardware, overhead = result["environment"], result["overhead"]
    growth = [
        (
            name,
            rank,
            *(_slope(of_rank[figure]) for figure in ("malloc_bytes", "rss_bytes")),
            *(f"{of_rank[figure] / 2**20:.1f}" for figure in ("rss_at_half", "rss_at_end")),
            _slope(of_rank["num_blocks"]),
            *(f"{of_rank[f'num_{kind}']} ({of_rank[f'more_{kind}']:+d})" for kind in ("fds", "threads")),
        )
        for name, run in result["runs"].items()
        for rank, of_rank in enumerate(run["ranks"])
    ]
    share = (
        f"{overhead['step_cpu_seconds']:.3f}",
        f"{overhead['balancing_cpu_seconds'] * 1e3:.2f}",
        f"{overhead['cpu_share']:.2%}",
        f"{overhead['exposed_seconds'] * 1e3:.2f}",
        f"{overhead['exposed_share']:.3%}",
        f"{overhead['cpu_share'] + overhead['exposed_share']:.2%}",
    )
    paired = [
        (name, *(f"{of[figure]:.4f}" for figure in ("mean", "median", "standard_error")))
        for name, of in (("CPU seconds", overhead["by_cpu"]), ("seconds", overhead["by_clock"]))
    ]
    return f"""{page_head("Soak", result["command"])}
- {hardware["device"]}, 2 ranks, one thread each; {versions_of(result)}; glibc's malloc as it comes
- {result["num_steps"]} steps on lengths that drift; balanced: look-ahead 3, overlap, online calibration, record
- sampled every 20 steps, after a collection of garbage; growth is of the second half of the run: the median slope of
  pairs of samples that are whole swings of the lengths apart, and its quartiles
- given out: by malloc and not got back; resident memory holds besides what malloc's arenas keep, which grows by jumps
- blocks: of Python's allocator, one or more a small object

{table(_GROWTH, growth)}

## What balancing adds to a step

The quickstart's model; {overhead["num_pairs"]} pairs of steps on the same micro-batches, with and without the work of
balancing and watching, by turns, in one run.

{table(f"{_SHARE} | together (limit {LIMIT:.0%})", [share], align="rrrrrr")}

With over without, all ranks together, pair by pair; it holds what the meter does not see (the network's threads) and
what else the machine does:

{table("| mean | median | standard error", paired, align="lrrr")}
"""


def _slope(slope: dict[str, float]) -> str:
    return f"{slope['per_step']:.1f} ({slope['low']:.1f} to {slope['high']:.1f})".replace("-0.0", "0.0")
