"""Plans with dynamic context-parallel sizes, beside Megatron dev's scheduler and a perfect plan at one size.

scripts/bench_dynamic_cp.sh runs it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.dynamic_cp.dev_scheduler import CHECKOUT, load_scheduler
from benchmarks.dynamic_cp.measure import measure_cell, measure_time
from benchmarks.dynamic_cp.report import report
from benchmarks.dynamic_cp.setups import EXCHANGES, OBJECTIVES, QUICK_SETUPS, SETUPS, TIMED_SETUPS, batches
from benchmarks.planner.options import add_options, lengths_folder
from benchmarks.results_file import made_by, write_results

NUM_BATCHES = 6


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark.

    Args:
        arguments: of the command line; None takes the process's own.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog="scripts/bench_dynamic_cp.sh", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two setups, two batches: seconds in all")
    add_options(parser, command="scripts/bench_dynamic_cp.sh --out benchmarks/results")
    args = parser.parse_args(arguments)
    folder = lengths_folder(args)
    num_batches = 2 if args.quick else NUM_BATCHES
    checkout = os.environ.get(CHECKOUT)
    scheduler = load_scheduler(Path(checkout)) if checkout else None

    cells: list[dict[str, object]] = []
    for setup in QUICK_SETUPS if args.quick else SETUPS:
        planned = [
            (
                batch,
                scheduler(batch, num_ranks=setup.topology.num_leaves, max_tokens_per_gpu=setup.max_tokens_per_gpu)
                if scheduler
                else None,
            )
            for batch in batches(setup, num_batches=num_batches, folder=folder)
        ]
        for objective in OBJECTIVES:
            for exchange in EXCHANGES:
                cell = measure_cell(setup, exchange=exchange, objective=objective, planned=planned)
                cells.append(asdict(cell))
                _announce(f"{setup.name}, {objective}, {exchange:g}: {cell.ours:.4f}, dev {cell.dev or 0:.3f}")
    times = [
        asdict(time)
        for setup in (() if args.quick else TIMED_SETUPS)
        for batch in batches(setup, num_batches=1, folder=folder)
        for time in measure_time(batch, setup=setup, exchange=0.01, announce=_announce)
    ]
    result = made_by(
        args.command,
        num_batches=num_batches,
        real_lengths=folder is not None,
        dev="next_hdp_group_packing_aware of a checkout" if scheduler else None,
        cells=cells,
        times=times,
    )
    sys.stdout.write(write_results("dynamic_cp", result, report=report, out=args.out))
    return 0


def _announce(line: str) -> None:
    sys.stderr.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(main())
