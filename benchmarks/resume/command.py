"""Kills training runs with SIGKILL at random steps, resumes them, and compares them with runs that were not killed.

Every row of the data has a length of its own, by which a step's samples are known. The samples of every step must be
the same; loss and gradient norm equal bit for bit on as many ranks as before, and to rounding on another number.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping
from typing import Any

import numpy as np
from forked import import_once

from benchmarks.equality.cases import NUM_STEPS, SEED
from benchmarks.equality.rows import NUM_ROWS, rows_of_distinct_lengths, write_rows
from benchmarks.publish import RAW, Measured, fresh, say, table
from benchmarks.resume.cases import SAVE_INTERVAL, Case, cases
from benchmarks.resume.killed import kill_and_resume, steps_of

TITLE = "Killed runs"
FOLDER = RAW / "resume"
LEAN = ("by FLOPs, DP2→DP2, overlap", "dynamic CP, DP2→DP4, overlap")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name holds this")
    parser.add_argument("--lean", action="store_true", help="a case of each kind")
    parser.add_argument("--seed", type=int, default=1, help="of the steps at which runs are killed")


def measure(args: argparse.Namespace) -> Measured:
    write_rows(fresh(FOLDER) / "rows.jsonl", rows_of_distinct_lengths(), order=range(NUM_ROWS))
    data = f"--data-path {FOLDER / 'rows.jsonl'} --seed {SEED}"
    import_once()
    rows: list[list[Any]] = []
    for number, case in enumerate(cases()):
        if args.only not in case.name or (args.lean and case.name not in LEAN):
            continue
        folder, rng = FOLDER / f"case{number}", np.random.default_rng([args.seed, number])
        outcome = kill_and_resume(case, whole=whole_of(case, data=data), folder=folder, data=data, rng=rng)
        equal = f"{outcome.num_equal} of {outcome.num_compared} steps"
        killed = [outcome.killed_after, outcome.victims, outcome.resumed_at]
        row = [case.name, *killed, equal, outcome.largest_difference, outcome.problem]
        say(f"{row}")
        rows.append(row)
        shutil.rmtree(folder, ignore_errors=True)
    return Measured({"seed": args.seed, "cases": rows}, problems=[f"{row[0]}: {row[-1]}" for row in rows if row[-1]])


_whole: dict[Any, list[dict[str, Any]]] = {}


def whole_of(case: Case, *, data: str) -> list[dict[str, Any]]:
    """Steps of the run that is not killed; trained once for all cases that are held against it."""
    key = case.flags, case.ranks
    if key not in _whole:
        _whole[key] = steps_of(FOLDER / f"whole{len(_whole)}", flags=f"{case.flags} {data}", num_ranks=case.ranks)
    return _whole[key]


def section(figures: Mapping[str, Any]) -> str:
    rows = [(*case, f"{far:.1e}", problem or "good") for *case, far, problem in figures["cases"]]
    columns = "case | killed after step | whom | resumed at | equal bit for bit | largest difference | verdict"
    return f"""fp32, plain optimizer, {NUM_STEPS} steps, a checkpoint every {SAVE_INTERVAL}, a real SIGKILL after a step
drawn at random (seed {figures["seed"]}). The resumed run is held against one that was not killed: the samples of every
step must be the same; the difference is the largest of loss or gradient norm.

{table(columns, rows, align="lrlrlrl")}"""
