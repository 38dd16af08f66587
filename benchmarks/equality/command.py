"""Trains with and without balancing in every layout, precision and optimizer, and compares loss and gradient norm.

Goes on where it was interrupted. A balanced run equals stock where every step differs from it by at most what the
number format allows (mcore/verify.py), or SPREAD times what another order or grouping of the same rows
changes in stock runs, at its largest over all cells of that precision, where that is more. On GPUs (`--device cuda`) in
bf16, over NCCL, the layouts that this machine has a GPU a rank for.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forked import import_once, train_forked
from sft_dataset import SftSample
from training_run import ALLOWANCES, RunFailed, train

from benchmarks.equality.cases import (
    AUX_LAYOUTS,
    GLOBAL_BATCH_SIZE,
    LAYOUTS,
    NUM_STEPS,
    POLICIES,
    PRECISIONS,
    SEQ_LENGTH,
    SHUFFLED,
    STOCK,
    TORCHRUN,
    YARDSTICKS,
    Case,
    cases,
)
from benchmarks.equality.outcomes import Difference, Outcome, OutcomeFile, difference, outcome_of
from benchmarks.equality.rows import NUM_ROWS, rows_of_distinct_lengths, shuffled_within_steps, write_rows
from benchmarks.publish import RAW, Measured, fresh, made_by, say, table

TITLE = "Equality"
TIMEOUT_SECONDS = 900
"""Of one run; a loaded machine is slow, a hang is for ever."""

SPREAD = 3
"""Two samples of one spread, the largest of eight steps each, differ by less."""

GROUPS = {
    "by FLOPs": ("by FLOPs",),
    "by tokens": ("by tokens",),
    "one a micro-batch": ("moved, one a micro-batch",),
    "in place": ("packed in place", "by FLOPs in place"),
    "algorithms": ("Karmarkar-Karp",),
}
"""Columns of the table, and the policies of each."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--whole", action="store_true", help="every policy in every cell, not on three layouts only")
    parser.add_argument("--only", default="", metavar="TEXT", help="runs whose name holds this, and what they need")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the ranks (default: cpu)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no run after this time")
    parser.add_argument("--folder", type=Path, help="of the runs (default: build/bench/equality-DEVICE)")
    parser.add_argument("--anew", action="store_true", help="forget what earlier calls ran")


def measure(args: argparse.Namespace) -> Measured:
    folder = args.folder or RAW / f"equality-{args.device}"
    if args.anew:
        shutil.rmtree(folder, ignore_errors=True)
    kept = OutcomeFile(folder / "runs.jsonl")
    chosen = [case for case in cases(whole=args.whole) if args.only in case.name]
    if args.device == "cuda":
        import torch

        chosen = [case for case in chosen if case.precision == "bf16" and case.num_ranks <= torch.cuda.device_count()]
    chosen = _with_references(chosen)
    until = time.monotonic() + 60 * args.minutes
    _run_missing([case for case in chosen if not kept.is_done(case)], kept=kept, folder=folder, args=args, until=until)
    return compared(chosen, kept.outcomes)


def _with_references(chosen: Sequence[Case]) -> list[Case]:
    """Each after what it is compared with and judged by."""
    ordered: dict[Case, None] = {}
    for case in chosen:
        references = [case.beside(STOCK), *([case.beside(SHUFFLED)] if case.is_balanced else [])]
        ordered |= dict.fromkeys((*references, case.reference, case))
    return list(ordered)


def _run_missing(
    missing: Sequence[Case], *, kept: OutcomeFile, folder: Path, args: argparse.Namespace, until: float
) -> None:
    if missing and args.device == "cpu":
        import_once()
    rows, revision = rows_of_distinct_lengths(), made_by("")["revision"]
    for number, case in enumerate(missing, start=1):
        if time.monotonic() > until:
            return
        outcome = _run(case, rows=rows, folder=folder, revision=revision, device=args.device)
        kept.add(outcome)
        line = f"{number}/{len(missing)} {case.name}: {outcome.cpu_seconds:.1f} CPU s, {outcome.seconds:.1f} s"
        say(f"{line}{'' if outcome.error is None else ' FAILED ' + outcome.error}")


def _run(case: Case, *, rows: Sequence[SftSample], folder: Path, revision: str, device: str) -> Outcome:
    record, data = folder / "run", folder / "rows.jsonl"
    fresh(record)
    write_rows(data, rows, order=shuffled_within_steps() if case.way == SHUFFLED else range(NUM_ROWS))
    flags = [*case.flags.split(), "--data-path", str(data)]
    ranks: dict[str, Any] = {"num_ranks": case.num_ranks, "timeout_seconds": TIMEOUT_SECONDS}
    try:
        if case.way == TORCHRUN or device == "cuda":  # a process that has used a GPU cannot fork
            run = train(record, flags, device=device, **ranks)
        else:
            run = train_forked(record, flags, **ranks)
    except RunFailed as error:
        return Outcome(case, revision, error=str(error))
    return outcome_of(case, run, revision=revision)


def compared(chosen: Sequence[Case], outcomes: Mapping[Case, Outcome]) -> Measured:
    """Largest differences by layout, precision and policy, and the runs that are not equal."""
    differences = {case: far for case in outcomes if (far := _difference(case, outcomes)) is not None}
    yardsticks = {
        precision: _largest(far for case, far in differences.items() if _is(case, precision, YARDSTICKS))
        for precision in PRECISIONS
    }
    problems = list(_problems(chosen, outcomes, differences, yardsticks))
    run = [case for case in chosen if case in outcomes]
    rows: dict[str, dict[str, Any]] = {}
    for layout in (*LAYOUTS, *AUX_LAYOUTS):
        for precision in PRECISIONS:
            row_outcomes = {
                case: far for case, far in differences.items() if (case.layout, case.precision) == (layout, precision)
            }
            cells = {
                name: _largest(far for case, far in row_outcomes.items() if case.way in ways)
                for name, ways in GROUPS.items()
            }
            cells["stock, regrouped"] = _largest(far for case, far in row_outcomes.items() if case.way in YARDSTICKS)
            if any(cells.values()):
                rows[f"{layout}, {precision}"] = {
                    name: far and [far.loss, far.grad_norm] for name, far in cells.items()
                }
    forked = _largest(far for case, far in differences.items() if case.way == TORCHRUN)
    figures = {
        "num_runs": len(run),
        "num_missing": len(chosen) - len(run),
        "num_problems": len(problems),
        "rows": rows,
        "torchrun": forked and [forked.loss, forked.grad_norm],
    }
    return Measured(figures, raw=[_raw(case, far) for case, far in differences.items()], problems=problems)


def _raw(case: Case, far: Difference) -> dict[str, Any]:
    return asdict(case) | asdict(far)


def _difference(case: Case, outcomes: Mapping[Case, Outcome]) -> Difference | None:
    outcome, reference = outcomes[case], outcomes.get(case.reference)
    if outcome.error is not None or reference is None or reference.error is not None:
        return None
    return difference(outcome, reference=reference)


def _problems(
    chosen: Sequence[Case],
    outcomes: Mapping[Case, Outcome],
    differences: Mapping[Case, Difference],
    yardsticks: Mapping[str, Difference | None],
) -> Iterator[str]:
    for case in chosen:
        far, yardstick, allowed = differences.get(case), yardsticks[case.precision], ALLOWANCES[case.precision]
        if case in outcomes and far is None:
            yield f"{case.name}: {outcomes[case].error or 'its reference failed'}"
        if far is None or not case.is_balanced or case.layout in AUX_LAYOUTS:
            continue
        if case.way == TORCHRUN:
            limits = 0.0, 0.0
        elif yardstick is None:
            yield f"{case.name}: no other stock run to judge it by"
            continue
        else:
            limits = max(allowed.loss, SPREAD * yardstick.loss), max(allowed.grad_norm, SPREAD * yardstick.grad_norm)
        if far.loss > limits[0] or far.grad_norm > limits[1]:
            yield f"{case.name}: loss {far.loss:.1e}, gradient norm {far.grad_norm:.1e}"


def _is(case: Case, precision: str, ways: Iterable[str]) -> bool:
    return case.layout in LAYOUTS and case.way in ways and case.precision == precision


def _largest(differences: Iterable[Difference]) -> Difference | None:
    seen = [tuple(asdict(one).values()) for one in differences]
    return Difference(*map(max, zip(*seen, strict=True))) if seen else None


def section(figures: Mapping[str, Any]) -> str:
    names = [*GROUPS, "stock, regrouped"]
    rows = [[row, *(_cell(cells.get(name)) for name in names)] for row, cells in figures["rows"].items()]
    missing = (
        f" {figures['num_missing']} more are part of the command and not run yet." if figures["num_missing"] else ""
    )
    started = ""
    if figures["torchrun"]:
        loss, grad_norm = figures["torchrun"]
        started = f" The same run started by torchrun differs from a forked one by {loss:g} and {grad_norm:g}."
    return f"""{figures["num_runs"]} runs of {NUM_STEPS} steps, {figures["num_problems"]} failed or differ by more than
rounding.{missing} Every run trains on the same rows in the same steps, {GLOBAL_BATCH_SIZE} rows of up to {SEQ_LENGTH}
tokens each, from one seed. A cell is the largest relative difference of a step's loss and of its gradient norm from
stock, over optimizers (plain, distributed, with overlap) and the policies of the column ({len(POLICIES)} in all);
*regrouped* is stock with its rows shuffled within a step or several in a micro-batch. Auxiliary losses of experts are
computed a micro-batch at a time, in stock too.{started}

{table(" | ".join(["layout, precision", *names]), rows)}"""


def _cell(far: Sequence[float] | None) -> str:
    return "–" if far is None else f"{far[0]:.1e} / {far[1]:.1e}"
