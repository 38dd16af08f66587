"""Kills training runs with SIGKILL at random steps, resumes them, and compares them with runs that were not killed.

    scripts/check_resume.sh                        every case
    scripts/check_resume.sh --only 'DP2→DP4'       cases whose name holds this
    scripts/check_resume.sh --first 4 --seed 7     the first four, with other steps to be killed at
    scripts/check_resume.sh --lean                 a case of each kind, as the tests run them

Every row of the data has a length of its own, by which a step's samples are known. Under online calibration plans
follow measured seconds, which differ between any two runs: there the samples of every step must be equal, and losses to
rounding. The exit status is 1 where a case fails, 0 else.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from typing import Any

import numpy as np
from forked import import_once
from training_run import ROOT, RunFailed

from benchmarks.equality.cases import SEED
from benchmarks.equality.rows import NUM_ROWS, rows_of_distinct_lengths, write_rows
from benchmarks.markdown import table, table_row
from benchmarks.resume.cases import Case, cases
from benchmarks.resume.killed import kill_and_resume, steps_of
from benchmarks.resume.mishaps import MISHAPS

FOLDER = ROOT / "build" / "bench" / "resume"
LEAN = (
    "look-ahead 3, DP2→DP2, overlap",
    "look-ahead 3, calibration, record, DP2→DP4, overlap",
    "dynamic CP, look-ahead 3, record, DP2→DP2, overlap",
    "dynamic CP, look-ahead 3, record, DP2→DP4, overlap",
    "a rank is killed with half of its samples written",
    "truncated samples: refused on every rank",
    "--async-save with look-ahead",
)
COLUMNS = "case | killed after step | whom | resumed at | equal bit for bit | largest difference |"


def main() -> int:
    """Run the cases, a row of the table each."""
    parser = argparse.ArgumentParser(prog="scripts/check_resume.sh", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name holds this")
    parser.add_argument("--lean", action="store_true", help="a case of each kind")
    parser.add_argument("--first", type=int, default=None, metavar="N", help="the first N of these")
    parser.add_argument("--seed", type=int, default=1, help="of the steps at which runs are killed")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no case after this time")
    args = parser.parse_args()
    until = time.monotonic() + 60 * args.minutes
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    rows = rows_of_distinct_lengths()
    write_rows(FOLDER / "rows.jsonl", rows, order=range(NUM_ROWS))
    data = f"--data-path {FOLDER / 'rows.jsonl'} --seed {SEED}"
    import_once()
    wanted: list[Case | str] = [case for case in cases() if args.only in case.name]
    wanted += [name for name in MISHAPS if args.only in name]
    if args.lean:
        wanted = [case for case in wanted if (case if isinstance(case, str) else case.name) in LEAN]
    num_failed = 0
    say(table(COLUMNS, (), align="lllllll"))
    for number, case in enumerate(wanted[: args.first]):
        if time.monotonic() > until:
            say("", f"{len(wanted) - number} cases were not run.")
            break
        folder = FOLDER / f"case{number}"
        rng = np.random.default_rng([args.seed, number])
        if isinstance(case, str):
            try:
                problem = MISHAPS[case](folder, data, whole_of)
            except RunFailed as error:
                problem = str(error).replace("\n", " ")[-1000:]
            say(table_row((case, "", "", "", "", "", problem or "good")))
        else:
            outcome = kill_and_resume(case, whole=whole_of(case, data=data), folder=folder, data=data, rng=rng)
            problem = outcome.problem
            equal = f"{outcome.num_equal} of {outcome.num_compared} steps"
            cells = case.name, outcome.killed_after, outcome.victims, outcome.resumed_at, equal
            say(table_row((*cells, f"{outcome.largest_difference:.1e}", problem or "good")))
        num_failed += bool(problem)
        shutil.rmtree(folder, ignore_errors=not problem)
    return 1 if num_failed else 0


_whole: dict[Any, list[dict[str, Any]]] = {}


def whole_of(case: Case, *, data: str) -> list[dict[str, Any]]:
    """Steps of the run that is not killed; trained once for all cases that are held against it."""
    key = case.flags, case.ranks
    if key not in _whole:
        _whole[key] = steps_of(FOLDER / f"whole{len(_whole)}", flags=f"{case.flags} {data}", num_ranks=case.ranks)
    return _whole[key]


def say(*lines: str) -> None:
    """Print lines at once: a case takes a while."""
    sys.stdout.write("\n".join([*lines, ""]))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
