"""Trains with every fault on gloo ranks that nothing ends but themselves, and checks what each rank says at its end.

No rank may outlive the timeout of its process groups, and each must end with an error that says what was wrong.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from forked import import_once

from benchmarks.faults.cases import FAULTS, KINDS, TIMEOUT_SECONDS
from benchmarks.faults.run import run_with
from benchmarks.publish import RAW, Measured, table

TITLE = "Faults"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=f"of: {', '.join(FAULTS)} (default: all)")


def measure(args: argparse.Namespace) -> Measured:
    """Runs the faults that are named, or all."""
    unknown = set(args.faults) - set(FAULTS)
    if unknown:
        raise SystemExit(f"there is no fault {', '.join(sorted(unknown))}; there are {', '.join(FAULTS)}")
    import_once()
    folder = RAW / "faults"
    shutil.rmtree(folder, ignore_errors=True)
    rows: dict[str, dict[str, Any]] = {}
    for name in args.faults or FAULTS:
        fault = FAULTS[name]
        outcome = run_with(fault, folder=folder / name)
        left = [end for rank, end in enumerate(outcome.ends) if not (fault.dies and rank in fault.ranks)]
        ends = [asdict(end) | {"output": end.last_word} for end in left]
        rows[name] = {"seconds": max(end.seconds for end in left), "wrong": outcome.wrong, "ends": ends}
        sys.stdout.write(f"{name}, {fault.layout}: {rows[name]['seconds']:.1f} s, {left[0].last_word[:150]}\n")
        sys.stdout.flush()
    kinds = {kind: [rows[name] for name in of_kind if name in rows] for kind, of_kind in KINDS.items()}
    figures = {
        kind: [len(of_kind), sum(not row["wrong"] for row in of_kind), max(row["seconds"] for row in of_kind)]
        for kind, of_kind in kinds.items()
        if of_kind
    }
    problems = [f"{name}: {what}" for name, row in rows.items() for what in row["wrong"]]
    return Measured({"kinds": figures}, raw=rows, problems=problems)


def section(figures: Mapping[str, Any]) -> str:
    """Markdown of the figures."""
    rows = [(kind, num, good, f"{seconds:.1f} s") for kind, (num, good, seconds) in figures["kinds"].items()]
    return f"""Megatron's own training loop on two or four gloo ranks that nothing ends but themselves; process
groups time
out after {TIMEOUT_SECONDS} s. *As it must be*: every rank that is left ends, with an error that says what was wrong.
*Longest*: from the fault, or the first rank's end, to the end of the last rank that is left.

{table("kind | faults | as it must be | longest", rows)}"""
