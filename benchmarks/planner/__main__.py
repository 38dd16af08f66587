"""Plans every setup in every way and writes the results. Run by scripts/bench_planner.sh."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.planner.ablation import run_ablation
from benchmarks.planner.baselines import BASELINES
from benchmarks.planner.growth import QUICK_SIZES, SIZES, draw_growth, plan_growth
from benchmarks.planner.losses import ABLATED_SETUPS
from benchmarks.planner.measure import Row, measure_row
from benchmarks.planner.options import add_options, lengths_folder
from benchmarks.planner.ratios import speed_ratios
from benchmarks.planner.report import Results, make_header, write_planner
from benchmarks.planner.scale import SIZES as SIZES_AT_SCALE
from benchmarks.planner.scale import run_scale
from benchmarks.planner.setups import QUICK_SETUPS, SETUPS, Setup, global_batches


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status. `None` takes the process's command line."""
    args = _parser().parse_args(arguments)
    folder = lengths_folder(args)
    setups = QUICK_SETUPS if args.quick else SETUPS
    args.out.mkdir(parents=True, exist_ok=True)

    rows = [row for setup in setups for row in _rows(setup, folder=folder)]
    _announce("speed ratios")
    ratios = speed_ratios(num_samples=512, num_ranks=8) if args.quick else speed_ratios()
    points = plan_growth(QUICK_SIZES if args.quick else SIZES, announce=_announce)

    plot: str | None = "planner_growth.svg"
    try:
        draw_growth(points, args.out / plot)
    except ImportError:
        plot = None
        _announce("no plot: matplotlib is not installed; `pip install .[bench]` has it")
    header = make_header(command=args.command, real_lengths=folder is not None)
    results = Results(header=header, setups=setups, rows=rows, speed_ratios=ratios, growth=points, plot=plot)
    write_planner(results, args.out)
    gc.unfreeze()  # measure.py froze what was imported.
    _announce(f"wrote planner.md and planner.json to {args.out}")
    ablated = QUICK_SETUPS if args.quick else ABLATED_SETUPS
    run_scale(
        (64,) if args.quick else SIZES_AT_SCALE, folder=folder, command=args.command, out=args.out, announce=_announce
    )
    run_ablation(setups=ablated, folder=folder, header=header, out=args.out, announce=_announce)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/bench_planner.sh", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small setups, few batches: seconds in all")
    add_options(parser, command="scripts/bench_planner.sh")
    return parser


def _rows(setup: Setup, *, folder: Path | None) -> list[Row]:
    batches = list(global_batches(setup, lengths_folder=folder))
    _announce(f"{setup.name}: {len(batches)} batches of {setup.global_batch_size} samples")
    rows: list[Row] = []
    for planner in BASELINES:
        row = measure_row(planner, setup=setup, batches=batches)
        figures = "" if row.mean_over_bound is None else f"{row.mean_over_bound:.4f}  {row.plan_cpu_ms:.1f} ms"
        _announce(f"    {planner:50} {figures} {row.note}".rstrip())
        rows.append(row)
    return rows


def _announce(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
