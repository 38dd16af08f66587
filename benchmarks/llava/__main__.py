"""Work of the busiest rank and seconds of a step of LLaVAModel, planned by tokens and by both parts, on CPU ranks.

scripts/bench_llava.sh                              some minutes
scripts/bench_llava.sh --out benchmarks/results     what is committed
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from forked import import_once, train_forked
from training_run import ROOT, Recorded

from benchmarks.llava.samples import CAP, MIXTURES, SAMPLES_PER_RANK, SIZES, cost_of, ways
from benchmarks.markdown import table
from benchmarks.results_file import made_by, page_head, versions_of, write_results

COMMAND = "scripts/bench_llava.sh"
NUM_STEPS = 7
FIRST = 2
"""Steps that are not counted: a run's first ones allocate memory and connect ranks."""
ROUNDS = 2
"""Runs of each way. Of a step's times the least one counts: others on the machine only add to them."""


def main() -> int:
    """Train, print, write. The exit status is 1 where losses differ from stock ones."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench", help="folder of the results")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4], help="data-parallel ranks")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="of each run")
    args = parser.parse_args()
    folder = ROOT / "build" / "bench" / "runs" / "llava"
    shutil.rmtree(folder, ignore_errors=True)
    import_once(["benchmarks.llava.rank"])
    rows = [
        row
        for mixture in MIXTURES
        for num_ranks in args.ranks
        for row in _compared(folder / mixture / str(num_ranks), mixture, num_ranks=num_ranks, num_steps=args.steps)
    ]
    result = made_by(COMMAND, cores=os.cpu_count(), num_steps=args.steps, rows=rows)
    sys.stdout.write(write_results("llava", result, report=report, out=args.out))
    return int(any(row["loss_difference"] > 1e-5 for row in rows))


def _compared(folder: Path, mixture: str, *, num_ranks: int, num_steps: int) -> list[dict[str, Any]]:
    """A row for each way, on the same samples."""
    runs: dict[str, list[Recorded]] = {way: [] for way in ways()}
    for index in range(ROUNDS):
        for way, of_way in runs.items():
            forked = train_forked(
                folder / f"{index}-{way.replace(' ', '-')}",
                [],
                num_ranks=num_ranks,
                timeout_seconds=600,
                module="benchmarks.llava.rank",
                environment={"MIXTURE": mixture, "WAY": way, "NUM_STEPS": str(num_steps)},
            )
            of_way.append(forked.recorded)
    stock = runs["stock"][0].steps
    return [
        {"mixture": mixture, "num_ranks": num_ranks, "way": way}
        | _figures(of_way)
        | {
            "loss_difference": max(
                abs(ours["lm_loss"] / theirs["lm_loss"] - 1)
                for ours, theirs in zip(of_way[0].steps, stock, strict=True)
            )
        }
        for way, of_way in runs.items()
    ]


def _figures(of_way: Sequence[Recorded]) -> dict[str, float]:
    """Medians over steps; busiest over mean are means of each step's."""
    steps = list(zip(*of_way[0].ranks, strict=True))[FIRST:]
    planned = [[cost_of(row["sequences"], row["num_tiles"]) for row in of_ranks] for of_ranks in steps]

    def least(figure: str) -> list[list[float]]:
        runs = [[[row[figure] for row in of_ranks] for of_ranks in zip(*run.ranks, strict=True)] for run in of_way]
        return np.min(runs, axis=0)[FIRST:].tolist()

    cpu = least("cpu_seconds")
    return {
        "planned": fmean(max(costs) * len(costs) / sum(costs) for costs in planned),
        "measured": fmean(max(seconds) * len(seconds) / sum(seconds) for seconds in cpu),
        "busiest_cpu_seconds": median(map(max, cpu)),
        "seconds": median(map(max, least("seconds"))),
        "microbatches": fmean(len(row["num_tiles"]) for of_ranks in steps for row in of_ranks),
    }


def report(result: Mapping[str, Any]) -> str:
    """The page."""
    stock = {(row["mixture"], row["num_ranks"]): row for row in result["rows"] if row["way"] == "stock"}

    def ratio(row: Mapping[str, Any], figure: str) -> str:
        base = stock[row["mixture"], row["num_ranks"]]
        return f"{row[figure]:.2f} ({base[figure] / row[figure]:.2f}×)"

    rows = [
        (
            row["mixture"],
            row["num_ranks"],
            row["way"],
            f"{row['microbatches']:.1f}",
            f"{row['planned']:.3f}",
            f"{row['measured']:.3f}",
            ratio(row, "busiest_cpu_seconds"),
            ratio(row, "seconds"),
            f"{row['loss_difference']:.0e}",
        )
        for row in result["rows"]
    ]
    columns = (
        "samples | ranks | planned by | micro-batches | busiest / mean, planned | measured | "
        "CPU seconds of the busiest rank | seconds of a step | difference of the loss"
    )
    sizes = ", ".join(f"{name} {value}" for name, value in SIZES.items())
    text = f"""Data-parallel CPU ranks over gloo train megatron.core's LLaVAModel ({sizes}; pixel shuffle),
{SAMPLES_PER_RANK} samples a rank and step, cap {CAP} tokens, {result["num_steps"]} steps, the first {FIRST} left out.
`llava` is drawn from the published sizes of the LLaVA-1.5 instruction set, with assumed texts; in `documents` a quarter
of the samples is one to four scanned pages, an assumption (`benchmarks/planner/images.py`); in `code and documents`
every second sample of that is a text of the length of a code file, without an image. Pictures are cut into tiles as
InternVL does, and everything is smaller by the same factor (`benchmarks/llava/samples.py`). Stock Megatron runs one
sample a micro-batch. Planned figures are FLOPs of both parts of what each rank ran, measured ones CPU seconds of
forward and backward passes, the least of {ROUNDS} runs of each step; (n×) is stock over this. The machine has
{result["cores"]} cores: with more ranks than cores, seconds say less than CPU seconds. {versions_of(result)}."""
    head = page_head("Training on image-text samples", f"{result['command']} --out benchmarks/results")
    return f"{head}\n{text}\n\n{table(columns, rows, align='lrlrrrrrr')}\n"


if __name__ == "__main__":
    sys.exit(main())
