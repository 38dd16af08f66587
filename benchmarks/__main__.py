"""Runs one benchmark: `python -m benchmarks NAME [OPTIONS] [--publish]`.

Raw figures go to build/bench/NAME.json. `--publish` also writes the benchmark's key of benchmarks/results.json and its
section of benchmarks/RESULTS.md. The exit status is 1 where something measured is not as it must be.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.publish import filled, made_by, publish, rounded, write_raw

BENCHMARKS = {
    "quickstart": "benchmarks.quickstart",
    "planner": "benchmarks.planner.command",
    "pipelines": "benchmarks.pipelines.command",
    "prefixes": "benchmarks.prefixes",
    "pieces": "benchmarks.planner.pieces",
    "flops": "benchmarks.flops",
    "rates": "benchmarks.rates",
    "cluster": "benchmarks.cluster",
    "speeds": "benchmarks.speeds",
    "gpu": "benchmarks.gpu",
    "sft": "benchmarks.sft.command",
    "dynamic_cp": "benchmarks.dynamic_cp.command",
    "equality": "benchmarks.equality.command",
    "scale": "benchmarks.scale.command",
    "resume": "benchmarks.resume.command",
    "hosts": "benchmarks.hosts.command",
    "adapters": "benchmarks.adapters.command",
    "loaders": "benchmarks.loaders",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark that the first argument names; `None` takes the process's command line."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] not in BENCHMARKS:
        sys.stderr.write(f"usage: python -m benchmarks {{{','.join(BENCHMARKS)}}} [--publish] [OPTIONS]\n")
        return 0 if words[:1] in (["-h"], ["--help"]) else 2
    name = words[0]
    benchmark: Any = importlib.import_module(BENCHMARKS[name])
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=benchmark.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    benchmark.add_options(parser)
    parser.add_argument("--publish", action="store_true", help="write benchmarks/results.json and RESULTS.md")
    args = parser.parse_args(words[1:])
    measured = benchmark.measure(args)
    command = shlex.join(["python", "-m", "benchmarks", *(word for word in words if word != "--publish")])
    made = made_by(command, device=getattr(args, "device", "cpu"))
    file = write_raw(name, measured, made=made)
    figures = {"made": made} | dict(measured.figures)
    sys.stdout.write(f"\n{filled(benchmark.section(rounded(figures)))}\n\nraw figures: {file}\n")
    if args.publish:
        publish(name, benchmark, figures=figures)
    sys.stdout.write("".join(f"NOT as it must be: {problem}\n" for problem in measured.problems))
    return 1 if measured.problems else 0


if __name__ == "__main__":
    sys.exit(main())
