"""Trains with every fault, and prints a table of the outcomes.

    scripts/check_faults.sh                       all of them, a quarter of an hour
    scripts/check_faults.sh killed-computing      some

Every run is Megatron's own training loop with balancing on gloo ranks of this machine. No rank may outlive the timeout
of its process groups, and each must end with an error that says what was wrong.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from forked import import_once
from training_run import ROOT

from benchmarks.faults.cases import FAULTS, TIMEOUT_SECONDS, Fault
from benchmarks.faults.run import Outcome, run_with
from benchmarks.markdown import table, table_row

MAX_WORDS = 150


def main() -> None:
    """Run the faults that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=f"of: {', '.join(FAULTS)}")
    parser.add_argument("--logs", type=Path, help="keep what ranks printed in this folder, which must be new")
    chosen = parser.parse_args()
    unknown = set(chosen.faults) - set(FAULTS)
    if unknown:
        parser.error(f"there is no fault {', '.join(sorted(unknown))}; there are {', '.join(FAULTS)}")
    columns = "fault | ranks | what happens | ranks ended with | last after | the first of those left says"
    print(table(columns, (), align="llllll"))
    failures: list[str] = []
    import_once()
    folder = chosen.logs or ROOT / "build" / "bench" / "runs" / "faults"
    if chosen.logs is None:
        shutil.rmtree(folder, ignore_errors=True)
    for name in chosen.faults or FAULTS:
        outcome = run_with(FAULTS[name], folder=folder / name)
        print(_row(name, FAULTS[name], outcome), flush=True)
        failures += [f"{name}: {what}" for what in outcome.wrong]
    print(f"\nProcess groups time out after {TIMEOUT_SECONDS} s, and until the first step is done after minutes.")
    if failures:
        raise SystemExit("\n".join(["NOT as it must be:", *failures]))


def _row(name: str, fault: Fault, outcome: Outcome) -> str:
    left = [rank for rank in range(fault.num_ranks) if not (fault.dies and rank in fault.ranks)]
    codes = ", ".join(f"{outcome.ends[rank].exit_code}" for rank in left)
    seconds = max(outcome.ends[rank].seconds for rank in left)
    words = outcome.ends[left[0]].last_word.removeprefix("megatron_balance: ").replace("|", "/")
    words = words if len(words) <= MAX_WORDS else words[: MAX_WORDS - 1] + "…"
    return table_row((name, fault.layout, fault.happens, codes, f"{seconds:.1f} s", words))


if __name__ == "__main__":
    main()
