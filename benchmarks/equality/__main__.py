"""Train with and without balancing in every layout, precision and optimizer, and compare loss and gradient norm.

    scripts/equality_matrix.sh                  goes on where it was interrupted; rarer policies on three layouts only
    scripts/equality_matrix.sh --whole          every policy in every cell: what is committed
    scripts/equality_matrix.sh --only 'DP2 TP2' runs whose name holds this
    scripts/equality_matrix.sh --publish        also writes benchmarks/results/equality.* and docs/equality.md

The exit status is 1 where a run failed or differs by more than rounding, 0 else.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from training_run import ROOT, RunFailed, train

from benchmarks.equality.cases import LOOK_AHEAD, SHUFFLED, STOCK, TORCHRUN, Case, cases
from benchmarks.equality.forked import import_once, train_forked
from benchmarks.equality.outcomes import Outcome, OutcomeFile, outcome_of
from benchmarks.equality.report import Report
from benchmarks.equality.rows import NUM_ROWS, chosen, rows_of_distinct_lengths, shuffled_within_steps, write_rows
from megatron_balance.mcore.sft_dataset import SftSample

FOLDER = ROOT / "build" / "bench" / "equality"
TIMEOUT_SECONDS = 900
"""Of one run; a loaded machine is slow, a hang is for ever."""


def main() -> int:
    """Run what is missing, report."""
    parser = argparse.ArgumentParser(prog="scripts/equality_matrix.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--whole", action="store_true", help="every policy in every cell")
    parser.add_argument("--only", default="", metavar="TEXT", help="runs whose name holds this, and what they need")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no run after this time")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the runs (default: build/bench/equality)")
    parser.add_argument("--anew", action="store_true", help="forget what earlier calls ran")
    parser.add_argument("--publish", action="store_true", help="write benchmarks/results and docs/equality.md")
    args = parser.parse_args()
    if args.anew:
        shutil.rmtree(args.folder, ignore_errors=True)
    kept = OutcomeFile(args.folder / "runs.jsonl")
    wanted = _with_references([case for case in cases(whole=args.whole) if args.only in case.name])
    _run_missing(wanted, kept=kept, folder=args.folder, until=time.monotonic() + 60 * args.minutes)
    report = Report(wanted, kept.outcomes)
    sys.stdout.write(report.summary())
    if args.publish:
        (ROOT / "benchmarks" / "results" / "equality.json").write_text(report.json())
        (ROOT / "benchmarks" / "results" / "equality.md").write_text(report.every_run())
        (ROOT / "docs" / "equality.md").write_text(report.page())
    return 0 if report.is_good else 1


def _with_references(wanted: Sequence[Case]) -> list[Case]:
    """Each after what it is compared with; the stock run with look-ahead's rows after the run that chose them."""
    ordered: dict[Case, None] = {}
    for case in wanted:
        needed = [case.beside(STOCK)]
        if case.is_balanced:
            needed.append(case.beside(SHUFFLED))  # to judge it by
        if case.order == "as_chosen":
            needed.append(case.beside(LOOK_AHEAD))
        ordered |= dict.fromkeys((*needed, case, case.reference))
    return list(ordered)


def _run_missing(wanted: Sequence[Case], *, kept: OutcomeFile, folder: Path, until: float) -> None:
    missing = [case for case in wanted if not kept.is_done(case)]
    if not missing:
        return
    import_once()
    rows, revision = rows_of_distinct_lengths(), _revision()
    for number, case in enumerate(missing, start=1):
        if time.monotonic() > until:
            return
        outcome = _run(case, rows=rows, kept=kept, folder=folder, revision=revision)
        kept.add(outcome)
        line = f"{number}/{len(missing)} {case.name}: {outcome.cpu_seconds:.1f} CPU s, {outcome.seconds:.1f} s"
        sys.stdout.write(f"{line}{'' if outcome.error is None else ' FAILED ' + outcome.error}\n")
        sys.stdout.flush()


def _run(case: Case, *, rows: Sequence[SftSample], kept: OutcomeFile, folder: Path, revision: str) -> Outcome:
    record, data = folder / "run", folder / "rows.jsonl"
    shutil.rmtree(record, ignore_errors=True)
    record.mkdir(parents=True)
    if case.order == "as_chosen" and not kept.is_done(case.beside(LOOK_AHEAD)):
        return Outcome(case, revision, error="the run with look-ahead, whose rows this one takes, failed")
    order = list(range(NUM_ROWS))
    if case.order == "shuffled":
        order = shuffled_within_steps()
    elif case.order == "as_chosen":
        order = chosen(kept.outcomes[case.beside(LOOK_AHEAD)].taken, rows=rows)
    write_rows(data, rows, order=order)
    flags = [*case.flags.split(), "--data-path", str(data)]
    try:
        if case.way == TORCHRUN:
            recorded = train(record, flags, num_ranks=case.num_ranks, timeout_seconds=TIMEOUT_SECONDS)
            return outcome_of(case, recorded, revision=revision)
        run = train_forked(record, flags, num_ranks=case.num_ranks, timeout_seconds=TIMEOUT_SECONDS)
    except RunFailed as error:
        return Outcome(case, revision, error=str(error))
    return outcome_of(case, run.recorded, revision=revision, cpu_seconds=run.cpu_seconds, seconds=run.seconds)


def _revision() -> str:
    """The commit that last changed the package, with a mark where the checkout differs from it."""
    commit = _git("log", "-1", "--format=%h", "--abbrev=9", "--", "megatron_balance")
    return f"{commit or 'unknown'}{'-dirty' if _git('status', '--porcelain', '--', 'megatron_balance') else ''}"


def _git(*arguments: str) -> str:
    said = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return said.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
