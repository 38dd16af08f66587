"""Seconds and loss of evaluation, stock against balanced, on the same rows.

scripts/bench_evaluation.sh                              a minute
scripts/bench_evaluation.sh --out benchmarks/results     what is committed
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from training_run import ROOT

from benchmarks.equality.cases import Layout
from benchmarks.forked import import_once, train_forked
from benchmarks.markdown import table
from benchmarks.results_file import made_by, page_head, versions_of, write_results

COMMAND = "scripts/bench_evaluation.sh"
SEQ_LENGTH, NUM_ITERATIONS, GLOBAL_BATCH_SIZE = 2048, 2, 16
FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 128 "
    f"--seq-length {SEQ_LENGTH} --max-position-embeddings {SEQ_LENGTH} --global-batch-size {GLOBAL_BATCH_SIZE} "
    f"--train-iters 2 --eval-interval 1 --eval-iters {NUM_ITERATIONS}"
)
WAYS = {
    "stock": "",
    "balanced": f"--use-dynamic-batch-size --max-tokens-per-gpu {SEQ_LENGTH} --balance-data --balance-by-flops",
}
LAYOUTS = {"DP2": Layout("", 2), "DP2, PP2": Layout("--pipeline-model-parallel-size 2", 4)}


def main() -> int:
    """Train, print, write. The exit status is 1 where losses differ."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench", help="folder of the results")
    args = parser.parse_args()
    folder = ROOT / "build" / "bench" / "runs" / "evaluation"
    shutil.rmtree(folder, ignore_errors=True)
    import_once()
    layouts: dict[str, dict[str, dict[str, Any]]] = {}
    for name, layout in LAYOUTS.items():
        layouts[name] = {
            way: _measured(folder / name / way, flags=f"{layout.flags} {flags}", num_ranks=layout.num_ranks)
            for way, flags in WAYS.items()
        }
    sys.stdout.write(write_results("evaluation", made_by(COMMAND, layouts=layouts), report=_report, out=args.out))
    return int(any(_difference(ways) > 1e-6 for ways in layouts.values()))


def _measured(record: Path, *, flags: str, num_ranks: int) -> dict[str, Any]:
    """Figures of a run: medians over its evaluations, without the first, and their losses."""
    run = train_forked(
        record,
        f"{FLAGS} {flags}".split(),
        num_ranks=num_ranks,
        timeout_seconds=600,
        module="benchmarks.evaluation.recorded",
    )
    ranks = [[row for row in rows if "evaluation" in row] for rows in run.recorded.ranks]
    evaluations = list(zip(*ranks, strict=True))[1:]
    return {
        "seconds": median(max(row["seconds"] for row in rows) for rows in evaluations),
        "busiest_cpu_seconds": median(max(row["cpu_seconds"] for row in rows) for rows in evaluations),
        "all_cpu_seconds": median(sum(row["cpu_seconds"] for row in rows) for rows in evaluations),
        "losses": [row["evaluation"]["lm loss"] for row in next(rows for rows in ranks if rows[0]["evaluation"])],
    }


def _difference(ways: Mapping[str, Mapping[str, Any]]) -> float:
    """Largest relative difference of a loss."""
    pairs = zip(ways["balanced"]["losses"], ways["stock"]["losses"], strict=True)
    return max(abs(ours - stock) / stock for ours, stock in pairs)


def _report(result: Mapping[str, Any]) -> str:
    rows = [
        (
            layout,
            *(
                f"{ways['stock'][figure]:.2f} → {ways['balanced'][figure]:.2f} "
                f"({ways['stock'][figure] / ways['balanced'][figure]:.2f}×)"
                for figure in ("seconds", "busiest_cpu_seconds", "all_cpu_seconds")
            ),
            f"{_difference(ways):.0e}",
        )
        for layout, ways in result["layouts"].items()
    ]
    columns = "layout | seconds | CPU seconds of the busiest rank | of all ranks | largest difference of the loss"
    return f"""{page_head("Evaluation", f"{result['command']} --out benchmarks/results")}
One evaluation of {NUM_ITERATIONS} iterations of {GLOBAL_BATCH_SIZE} rows: documents of the quickstart's corpus, at most
{SEQ_LENGTH:,} tokens, one a row and a micro-batch in stock Megatron; stock → balanced by FLOPs with a cap of
{SEQ_LENGTH:,} tokens. Medians over the evaluations of a run but the first. On a CPU with fewer cores than some layouts
have ranks, so that CPU seconds say more than seconds. {versions_of(result)}.

{table(columns, rows)}
"""


if __name__ == "__main__":
    sys.exit(main())
