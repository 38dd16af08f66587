"""Trains with and without balancing in every layout, precision and optimizer, and compares loss and gradient norm.

    scripts/equality_matrix.sh                  goes on where it was interrupted; rarer policies on three layouts only
    scripts/equality_matrix.sh --whole          every policy in every cell: what is committed
    scripts/equality_matrix.sh --only 'DP2 TP2' runs whose name holds this
    scripts/equality_matrix.sh --device cuda    over NCCL, in bf16, the layouts that this machine has GPUs for
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

from forked import import_once, train_forked
from training_run import ROOT, RunFailed, train

from benchmarks.equality.cases import LOOK_AHEAD, SHUFFLED, STOCK, TORCHRUN, Case, cases
from benchmarks.equality.outcomes import Outcome, OutcomeFile, outcome_of
from benchmarks.equality.report import Report
from benchmarks.equality.rows import NUM_ROWS, chosen, rows_of_distinct_lengths, shuffled_within_steps, write_rows
from megatron_balance.devkit.sft_dataset import SftSample

FOLDER = ROOT / "build" / "bench"
RESULTS = ROOT / "benchmarks" / "results"
TIMEOUT_SECONDS = 900
"""Of one run; a loaded machine is slow, a hang is for ever."""


def main() -> int:
    """Run the missing cases, report all."""
    parser = argparse.ArgumentParser(prog="scripts/equality_matrix.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--whole", action="store_true", help="every policy in every cell")
    parser.add_argument("--only", default="", metavar="TEXT", help="runs whose name holds this, and what they need")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the ranks (default: cpu)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no run after this time")
    parser.add_argument("--folder", type=Path, help="of the runs (default: build/bench/equality, or equality-cuda)")
    parser.add_argument("--anew", action="store_true", help="forget what earlier calls ran")
    parser.add_argument("--publish", action="store_true", help="write benchmarks/results and docs/equality.md")
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    name = "equality-cuda" if on_gpu else "equality"
    folder = args.folder or FOLDER / name
    if args.anew:
        shutil.rmtree(folder, ignore_errors=True)
    kept = OutcomeFile(folder / "runs.jsonl")
    wanted = [case for case in cases(whole=args.whole) if args.only in case.name]
    if on_gpu:
        wanted = _on_gpus(wanted)
    wanted = _with_references(wanted)
    until = time.monotonic() + 60 * args.minutes
    _run_missing(wanted, kept=kept, folder=folder, until=until, device=args.device)
    report = Report(wanted, kept.outcomes, device=args.device)
    sys.stdout.write(report.summary())
    if args.publish:
        (RESULTS / f"{name}.json").write_text(report.json())
        (RESULTS / f"{name}.md").write_text(report.every_run())
        if not on_gpu:
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


def _on_gpus(wanted: Sequence[Case]) -> list[Case]:
    """The cases in bf16, as packed attention kernels want it, that this machine has a GPU a rank for."""
    import torch

    num_gpus = torch.cuda.device_count()
    return [case for case in wanted if case.precision == "bf16" and case.num_ranks <= num_gpus]


def _run_missing(wanted: Sequence[Case], *, kept: OutcomeFile, folder: Path, until: float, device: str) -> None:
    missing = [case for case in wanted if not kept.is_done(case)]
    if not missing:
        return
    if device == "cpu":
        import_once()
    rows, revision = rows_of_distinct_lengths(), _revision()
    for number, case in enumerate(missing, start=1):
        if time.monotonic() > until:
            return
        outcome = _run(case, rows=rows, kept=kept, folder=folder, revision=revision, device=device)
        kept.add(outcome)
        line = f"{number}/{len(missing)} {case.name}: {outcome.cpu_seconds:.1f} CPU s, {outcome.seconds:.1f} s"
        sys.stdout.write(f"{line}{'' if outcome.error is None else ' FAILED ' + outcome.error}\n")
        sys.stdout.flush()


def _run(
    case: Case, *, rows: Sequence[SftSample], kept: OutcomeFile, folder: Path, revision: str, device: str
) -> Outcome:
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
        if case.way == TORCHRUN or device == "cuda":  # a process that has used a GPU cannot fork
            ranks = {"num_ranks": case.num_ranks, "device": device}
            recorded = train(record, flags, **ranks, timeout_seconds=TIMEOUT_SECONDS)
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
