"""Measures what balancing adds to a step of the quickstart's model: with and without its work, by turns, in one run.

Every step runs the same micro-batches (`alternating.py`). Two figures say what the work adds: the seconds and CPU
seconds of *on* against *off* steps, pair by pair; and the meter, which other jobs of the machine do not move: CPU
seconds of the preparing thread, of the prefetcher and of watching, and the seconds a step waited for its data.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from quickstart import BALANCED, FLAGS, NUM_RANKS
from training_run import ROOT, train

from benchmarks.metrics import WATCHED
from benchmarks.soak.runs import records_of

WARM_UP_STEPS = len(WATCHED)

LIMIT = 0.01
"""The share of a step that balancing may add."""


def measure_overhead(folder: Path, *, num_pairs: int, reuse: bool = False) -> dict[str, Any]:
    """Train and compare."""
    if reuse:
        return _figures(records_of(folder / "steps"))
    # The first step has nothing before it, and the last hands nothing on.
    num_steps = WARM_UP_STEPS + 2 * num_pairs + 1
    flags = [*FLAGS, *BALANCED.split(), "--train-iters", str(num_steps)]
    flags += ["--log-interval", "10", "--balance-record", str(folder / "record")]
    script = ROOT / "benchmarks" / "soak" / "alternating.py"
    return _figures(train(folder / "steps", flags, num_ranks=NUM_RANKS, script=script, timeout_seconds=3600).ranks)


def _figures(ranks: list[list[dict[str, Any]]]) -> dict[str, Any]:
    steps = list(zip(*(of_rank[WARM_UP_STEPS:] for of_rank in ranks), strict=True))
    steps = steps[: len(steps) // 2 * 2]
    on = [step for step in steps if step[0]["on"]]
    metered = [rank for step in on for rank in step]
    exposed = statistics.fmean(rank["exposed_seconds"] for rank in metered)
    cpu_seconds = statistics.fmean(rank["balancing_cpu_seconds"] for rank in metered)
    return {
        "num_pairs": len(steps) // 2,
        "step_seconds": statistics.fmean(rank["seconds"] for rank in metered),
        "step_cpu_seconds": statistics.fmean(rank["cpu_seconds"] for rank in metered),
        "plan_seconds": statistics.fmean(rank["plan_seconds"] for rank in metered),
        "exchange_seconds": statistics.fmean(rank["exchange_seconds"] for rank in metered),
        "exposed_seconds": exposed,
        "balancing_cpu_seconds": cpu_seconds,
        "exposed_share": exposed / statistics.fmean(rank["seconds"] for rank in metered),
        "cpu_share": cpu_seconds / statistics.fmean(rank["cpu_seconds"] for rank in metered),
        "by_cpu": _paired(steps, key="cpu_seconds"),
        "by_clock": _paired(steps, key="seconds"),
    }


def _paired(steps: list[tuple[dict[str, Any], ...]], *, key: str) -> dict[str, float]:
    """On over off: geometric mean and median of pairs of neighbours, all ranks together, and the error of the mean."""
    logs = []
    for first in range(0, len(steps), 2):
        off, on = sorted(steps[first : first + 2], key=lambda step: step[0]["on"])
        logs.append(math.log(sum(rank[key] for rank in on) / sum(rank[key] for rank in off)))
    return {
        "mean": math.exp(statistics.fmean(logs)),
        "median": math.exp(statistics.median(logs)),
        "standard_error": statistics.stdev(logs) / math.sqrt(len(logs)),
    }
