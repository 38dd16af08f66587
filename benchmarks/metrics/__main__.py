"""Measures the cost of figures and record in training: watched against unwatched steps, in turn, in one run.

    scripts/bench_metrics.sh --out benchmarks/results

Every step trains on the same global batch. Steps are watched, unwatched, unwatched, watched, and so on; a watched step
marks its micro-batches, counts its figures and is recorded; every fifth gathers and prints them, which a real run does
every tenth or hundredth. A pair is two neighbours; its ratio is watched over unwatched CPU seconds. Steps on the same
data still differ by some percent on a machine that others use, so the CPU seconds of the watching itself are metered
as well.
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

from quickstart import BALANCED, FLAGS, NUM_RANKS
from training_run import ROOT, train

from benchmarks.markdown import table
from benchmarks.metrics import WATCHED
from benchmarks.results_file import made_by, page_head, versions_of, write_results

WARM_UP_STEPS = len(WATCHED)
LOG_INTERVAL = 5
"""Prime to the turn, so that Megatron's own log falls on watched and unwatched steps equally."""

LIMIT = 0.005
"""Watching must cost less than half a percent of a step."""


_COLUMNS = "unwatched step, CPU seconds a rank | medians | sums | median of pairs | standard error of pairs | metered"


def main() -> int:
    """Train, print, write; the exit code says whether the limit holds."""
    parser = argparse.ArgumentParser(prog="scripts/bench_metrics.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench", help="folder of the results")
    parser.add_argument("--pairs", type=int, default=100, help="pairs of steps (default: 100)")
    args = parser.parse_args()
    folder = ROOT / "build" / "bench" / "runs" / "metrics"
    shutil.rmtree(folder, ignore_errors=True)
    num_steps = WARM_UP_STEPS + 2 * args.pairs
    flags = [*FLAGS, *BALANCED.split(), "--train-iters", str(num_steps + 1)]
    flags += ["--global-batch-size", "12", "--log-interval", str(len(WATCHED))]
    flags += ["--balance-record", str(folder / "record")]
    script = ROOT / "benchmarks" / "metrics" / "watched.py"
    run = train(folder / "steps", flags, num_ranks=NUM_RANKS, script=script, timeout_seconds=3600)
    result = made_by(f"scripts/bench_metrics.sh --pairs {args.pairs}", **_figures(run.ranks))
    text = write_results("metrics", result, report=_report, out=args.out)
    sys.stdout.write(text)
    return 0 if result["metered_share"] < LIMIT else 1


def _figures(ranks: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """CPU seconds of all ranks together, pair by pair."""
    steps = [sum(step["cpu_seconds"] for step in of_ranks) for of_ranks in zip(*ranks, strict=True)][WARM_UP_STEPS:]
    watched = [step["watched"] for step in ranks[0][WARM_UP_STEPS:]]
    pairs = [sorted(range(first, first + 2), key=lambda step: watched[step]) for first in range(0, len(steps) - 1, 2)]
    logs = [math.log(steps[on] / steps[off]) for off, on in pairs]
    of_watched = [steps[on] for _, on in pairs]
    of_unwatched = [steps[off] for off, _ in pairs]
    return {
        "num_pairs": len(pairs),
        "step_cpu_seconds": statistics.median(of_unwatched) / len(ranks),
        "ratio_of_medians": statistics.median(of_watched) / statistics.median(of_unwatched),
        "ratio_of_sums": sum(of_watched) / sum(of_unwatched),
        "median_of_ratios": math.exp(statistics.median(logs)),
        "standard_error": statistics.stdev(logs) / math.sqrt(len(logs)),
        "metered_share": _metered(ranks) / sum(of_watched),
    }


def _metered(ranks: list[list[dict[str, Any]]]) -> float:
    """CPU seconds of all ranks' watching."""
    return sum(step["watching_cpu_seconds"] for of_rank in ranks for step in of_rank[WARM_UP_STEPS:])


def _report(result: dict[str, Any]) -> str:
    ratios = [result[name] for name in ("ratio_of_medians", "ratio_of_sums", "median_of_ratios", "standard_error")]
    row = (f"{result['step_cpu_seconds']:.3f}", *(f"{ratio:.4f}" for ratio in ratios), f"{result['metered_share']:.2%}")
    return f"""{page_head("What watching costs", result["command"])}
- {result["environment"]["device"]}, {NUM_RANKS} ranks, one thread each; {versions_of(result)}
- {result["num_pairs"]} pairs of a watched and an unwatched step on the same data, alternating, in one run
- a line every {LOG_INTERVAL} steps and a record
- pair by pair: watched over unwatched CPU seconds; metered: CPU seconds of the watching over those of watched steps

{table(_COLUMNS, [row], align="rrrrrr")}
"""


if __name__ == "__main__":
    sys.exit(main())
