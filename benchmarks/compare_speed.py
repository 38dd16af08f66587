"""Measures how long `megatron-balance compare` takes on 100,000 lengths: CPU and wall seconds of whole commands.

    .venv/bin/python -m benchmarks.compare_speed [--repeats 3]

Seconds are of the command, numpy's import and reading of lengths included; the least of the repeats is printed, since
other work on the machine only adds.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from typing import NamedTuple

from benchmarks.markdown import table

SETTINGS = {
    "step, dp 8, batch 256": "--global-batch-size 256 --dp-size 8 --model Qwen3-8B",
    "step, dp 64, batch 1024": "--global-batch-size 1024 --dp-size 64 --model Qwen3-8B",
    "pipeline, dp 8, pp 4, batch 256": "--global-batch-size 256 --dp-size 8 --pp-size 4 --model Qwen3-8B",
    "all ranks meet, dp 8, ep 8, batch 256": "--global-batch-size 256 --dp-size 8 --ep-size 8 --model Qwen3-30B-A3B",
    "groups meet, dp 16, ep 8, batch 256": "--global-batch-size 256 --dp-size 16 --ep-size 8 --model Qwen3-30B-A3B",
}
_LENGTHS = "synthetic:servegen_mlarge:100000"


class Taken(NamedTuple):
    """Time of one command, CPU seconds being those of all its threads, and its last line."""

    wall_seconds: float
    cpu_seconds: float
    last_line: str


def measure(flags: str) -> Taken:
    """Run the command once."""
    command = [sys.executable, "-m", "megatron_balance", "compare", _LENGTHS, "--max-tokens-per-gpu", "16384"]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([*command, *flags.split()], capture_output=True, text=True, check=True)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Taken(wall, cpu, done.stdout.splitlines()[-1])


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    rows: list[tuple[str, ...]] = []
    for name, flags in SETTINGS.items():
        best = min((measure(flags) for _ in range(args.repeats)), key=lambda taken: taken.cpu_seconds)
        rows.append((name, f"{best.cpu_seconds:.1f}", f"{best.wall_seconds:.1f}", best.last_line))
    sys.stdout.write(table("setting | CPU s | wall s | what it says", rows, align="llll") + "\n")


if __name__ == "__main__":
    main()
