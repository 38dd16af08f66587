"""The ablation of slime's pull request 2017, without a GPU: tokens, approximate and exact FLOPs, calibrated seconds.

    python -m benchmarks.planner.ablation --out benchmarks/results

The planner's benchmark runs it as well.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.planner.ablation_report import Ablation, write_ablation
from benchmarks.planner.device_rates import ASSUMED_DEVICES, measured_devices
from benchmarks.planner.losses import ABLATED_SETUPS, measure_losses
from benchmarks.planner.options import ROOT, add_options, lengths_folder
from benchmarks.planner.report import Header, make_header
from benchmarks.planner.setups import QUICK_SETUPS, Setup

RESULTS = ROOT / "benchmarks" / "results"
"""Folder of measured calibrations."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the ablation and prints its tables; returns the exit status. `None` takes the process's command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner.ablation", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small setups, few batches: seconds in all")
    given = sys.argv[1:] if arguments is None else arguments
    add_options(parser, command=" ".join(["python -m benchmarks.planner.ablation", *given]))
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    folder = lengths_folder(args)
    run_ablation(
        setups=QUICK_SETUPS if args.quick else ABLATED_SETUPS,
        folder=folder,
        header=make_header(command=args.command, real_lengths=folder is not None),
        out=args.out,
        announce=_announce,
    )
    sys.stdout.write((args.out / "ablation.md").read_text(encoding="utf-8"))
    return 0


def run_ablation(
    *, setups: Sequence[Setup], folder: Path | None, header: Header, out: Path, announce: Callable[[str], None]
) -> Ablation:
    """Measures and writes ablation.md and ablation.json; calibrations in `out` judge too, beside the repository's."""
    folders = dict.fromkeys((RESULTS.resolve(), out.resolve()))
    devices = (*ASSUMED_DEVICES, *(device for place in folders for device in measured_devices(place)))
    losses = measure_losses(setups, devices=devices, lengths_folder=folder, announce=announce)
    ablation = Ablation(header=header, setups=setups, devices=devices, losses=losses)
    write_ablation(ablation, out)
    announce(f"wrote ablation.md and ablation.json to {out}")
    return ablation


def _announce(line: str) -> None:
    sys.stderr.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
