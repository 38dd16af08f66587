"""The figures of a soak as a page."""

from __future__ import annotations

from typing import Any

from benchmarks.soak.overhead import LIMIT


def report(result: dict[str, Any]) -> str:
    """The page.

    Args:
        result: as written to soak.json.
    """
    hardware, overhead = result["environment"], result["overhead"]
    versions = ", ".join(f"{name} {version}" for name, version in hardware["versions"].items())
    rows = [
        " | ".join(
            (
                f"| {name} | {rank} | {_slope(of_rank['malloc_bytes'])} | {_slope(of_rank['rss_bytes'])}",
                f"{of_rank['rss_at_half'] / 2**20:.1f} | {of_rank['rss_at_end'] / 2**20:.1f}",
                f"{_slope(of_rank['num_blocks'])} | {of_rank['num_fds']} ({of_rank['more_fds']:+d})",
                f"{of_rank['num_threads']} ({of_rank['more_threads']:+d}) |",
            )
        )
        for name, run in result["runs"].items()
        for rank, of_rank in enumerate(run["ranks"])
    ]
    paired = [
        f"| {name} | {of['mean']:.4f} | {of['median']:.4f} | {of['standard_error']:.4f} |"
        for name, of in (("CPU seconds", overhead["by_cpu"]), ("seconds", overhead["by_clock"]))
    ]
    return f"""# Soak

Made by the command below; do not edit.

    {result["command"]}

- {hardware["device"]}, 2 ranks, one thread each; {versions}; glibc's malloc as it comes
- {result["num_steps"]} steps on lengths that drift; balanced: look-ahead 3, overlap, online calibration, record
- sampled every 20 steps, after a collection of garbage; growth is of the second half of the run: the median slope of
  pairs of samples that are whole swings of the lengths apart, and its quartiles
- given out: by malloc and not got back; resident memory holds besides what malloc's arenas keep, which grows by jumps
- blocks: of Python's allocator, one or more a small object

| run | rank | given out, bytes a step | resident, bytes a step | MiB at half | MiB at end | blocks a step \
| open files (more) | threads (more) |
|---|---:|---:|---:|---:|---:|---:|---:|---:|
{chr(10).join(rows)}

## What balancing adds to a step

The quickstart's model; {overhead["num_pairs"]} pairs of steps on the same micro-batches, with and without the work of
balancing and watching, by turns, in one run.

| step, CPU seconds | work, CPU ms | share | waited, ms | share of seconds | together (limit {LIMIT:.0%}) |
|---:|---:|---:|---:|---:|---:|
| {overhead["step_cpu_seconds"]:.3f} | {overhead["balancing_cpu_seconds"] * 1e3:.2f} | {overhead["cpu_share"]:.2%} \
| {overhead["exposed_seconds"] * 1e3:.2f} | {overhead["exposed_share"]:.3%} \
| {overhead["cpu_share"] + overhead["exposed_share"]:.2%} |

With over without, all ranks together, pair by pair; it holds what the meter does not see (the network's threads) and
what else the machine does:

| | mean | median | standard error |
|---|---:|---:|---:|
{chr(10).join(paired)}
"""


def _slope(slope: dict[str, float]) -> str:
    return f"{slope['per_step']:.1f} ({slope['low']:.1f} to {slope['high']:.1f})".replace("-0.0", "0.0")
