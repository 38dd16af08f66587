"""Options that the benchmarks share: where lengths come from and where results go."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.planner.setups import find_lengths

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = ROOT.parent / "shared" / "data" / "lengths"
"""Folder of the real lengths in a development checkout; they are not part of the repository."""


def add_options(parser: argparse.ArgumentParser, *, command: str) -> None:
    """Adds `--synthetic`, `--lengths`, `--out` and `--command`."""
    parser.add_argument("--synthetic", action="store_true", help="lengths from the built-in fits, not from files")
    parser.add_argument("--lengths", type=Path, default=LENGTHS, metavar="DIR", help="folder of NAME.npz lengths")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "bench", metavar="DIR", help="folder of the results"
    )
    parser.add_argument("--command", default=command, help="the command as the header of the results shows it")


def lengths_folder(args: argparse.Namespace) -> Path | None:
    """The folder of real lengths; None where they are to be drawn, or are not there."""
    return None if args.synthetic else find_lengths(args.lengths)
