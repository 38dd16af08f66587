"""Plans for a pipeline, `auto` beside the algorithms by name: how far each is above the bound, and how long it takes.

    python -m benchmarks.planner.pipelines --out benchmarks/results     # a minute

Three length sets, 2 to 8 data-parallel ranks, 2 to 8 stages, 64 samples a rank; costs by the FLOPs of Qwen3-8B and 128
tokens besides for each micro-batch, as runs count them. The bound counts a bubble of empty micro-batches only, so no
plan comes near it. Then `auto` once more with larger caps than the longest sample.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.markdown import table
from benchmarks.results_file import page_of, write_results
from megatron_balance import CostModel, Limits, ModelShape, Topology
from megatron_balance.cost.model import MICROBATCH_TOKENS
from megatron_balance.lengths.read import synthetic_lengths
from megatron_balance.planner.build import build_data_schedule

CAPS = {"servegen_mlarge": 16384, "gsm8k_sft": 4096, "code_files": 32768}
"""Tokens of a micro-batch for each length set; longer samples are cut to it."""

ALGORITHMS = ("auto", "first_fit", "greedy", "karmarkar_karp")
RANKS = (2, 4, 8)
STAGES = (2, 4, 8)
SAMPLES_PER_RANK = 64
TIMES_CAP = (2, 4)
"""Caps that are tried besides."""

LARGE = ((8192, 128), (65536, 1024))
"""Samples and ranks of the batches that are planned for time, in a pipeline of 8 stages."""


@dataclass(frozen=True)
class Row:
    """One algorithm on one setup, means over its batches.

    Attributes:
        lengths: name of the length set.
        dp_size: data-parallel ranks.
        pp_size: stages.
        algorithm: as named.
        times_cap: the cap over the longest sample.
        over_bound: predicted cost over the lower bound.
        predicted_cost: of the step.
        num_microbatches: of a rank.
        plan_cpu_ms: this process's own computing for one plan, milliseconds.
    """

    lengths: str
    dp_size: int
    pp_size: int
    algorithm: str
    times_cap: int
    over_bound: float
    predicted_cost: float
    num_microbatches: float
    plan_cpu_ms: float


def main() -> int:
    """Plan, print, write; the exit code says whether `auto` was never above another."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner.pipelines", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="folder of the results")
    parser.add_argument("--batches", type=int, default=4, help="global batches of each setup (default: 4)")
    args = parser.parse_args()
    rows = [
        _row(name, dp_size=dp_size, pp_size=pp_size, algorithm=algorithm, num_batches=args.batches)
        for name in CAPS
        for dp_size in RANKS
        for pp_size in STAGES
        for algorithm in ALGORITHMS
    ]
    roomy = [
        _row(name, dp_size=dp_size, pp_size=pp_size, algorithm="auto", num_batches=args.batches, times_cap=times)
        for times in TIMES_CAP
        for name in CAPS
        for dp_size in RANKS
        for pp_size in STAGES
    ]
    large = [
        _row("servegen_mlarge", dp_size=dp_size, pp_size=8, algorithm=algorithm, num_batches=1, num_samples=num_samples)
        for num_samples, dp_size in LARGE
        for algorithm in ALGORITHMS
    ]
    content = [asdict(row) for row in (*rows, *roomy, *large)]
    lines = _report(rows, roomy=roomy, large=large, num_batches=args.batches)
    sys.stdout.write(write_results("pipelines", content, report=lambda _: page_of(lines), out=args.out))
    return int(any(_excess(of_setup) > 0 for of_setup in (*_by_setup(rows), *_by_setup(large))))


def _row(
    name: str,
    *,
    dp_size: int,
    pp_size: int,
    algorithm: str,
    num_batches: int,
    num_samples: int | None = None,
    times_cap: int = 1,
) -> Row:
    cap = CAPS[name]
    cost_model = CostModel.from_shape(ModelShape.preset("Qwen3-8B"), microbatch_tokens=MICROBATCH_TOKENS)
    over_bound, predicted_costs, num_microbatches, seconds = [], [], [], []
    for seed in range(num_batches):
        lengths = synthetic_lengths(name, num_samples=num_samples or SAMPLES_PER_RANK * dp_size, seed=seed)
        began = time.process_time()
        schedule = build_data_schedule(
            np.minimum(lengths, cap),
            cost_model=cost_model,
            topology=Topology(dp_size, pp_size=pp_size),
            limits=Limits(times_cap * cap),
            objective="pipeline",
            algorithm=algorithm,
        )
        seconds.append(time.process_time() - began)
        over_bound.append(schedule.predicted_cost / schedule.lower_bound)
        predicted_costs.append(schedule.predicted_cost)
        num_microbatches.append(schedule.num_microbatches)
    return Row(
        name,
        dp_size=dp_size,
        pp_size=pp_size,
        algorithm=algorithm,
        times_cap=times_cap,
        over_bound=statistics.fmean(over_bound),
        predicted_cost=statistics.fmean(predicted_costs),
        num_microbatches=statistics.fmean(num_microbatches),
        plan_cpu_ms=statistics.median(seconds) * 1e3,
    )


def _by_setup(rows: list[Row]) -> Iterator[list[Row]]:
    for first in range(0, len(rows), len(ALGORITHMS)):
        yield rows[first : first + len(ALGORITHMS)]


def _excess(of_setup: list[Row]) -> float:
    """The excess of `auto` over the best of the others."""
    auto, *named = (row.over_bound for row in of_setup)
    return auto - min(named)


def _report(rows: list[Row], *, roomy: list[Row], large: list[Row], num_batches: int) -> list[str]:
    by_setup = [
        (
            *(of_setup[0].lengths, of_setup[0].dp_size, of_setup[0].pp_size),
            *(f"{row.over_bound:.3f} ({row.num_microbatches:.3g})" for row in of_setup),
            f"{of_setup[0].plan_cpu_ms:.0f}",
        )
        for of_setup in _by_setup(rows)
    ]
    means = [statistics.fmean(row.over_bound for row in rows if row.algorithm == name) for name in ALGORITHMS]
    by_setup.append(("mean", "", "", *(f"**{mean:.3f}**" for mean in means), ""))
    tight = [row for row in rows if row.algorithm == "auto"]
    by_cap: list[tuple[str, ...]] = []
    for first in range(0, len(roomy), len(tight)):
        pairs = zip(roomy[first : first + len(tight)], tight, strict=True)
        times = [row.predicted_cost / beside.predicted_cost for row, beside in pairs]
        figures = (min(times), statistics.fmean(times), max(times))
        by_cap.append((f"{roomy[first].times_cap}", *(f"{figure:.3f}" for figure in figures)))
    by_size = [
        (*size, *(f"{row.over_bound:.3f} ({row.plan_cpu_ms:.0f} ms)" for row in of_setup))
        for size, of_setup in zip(LARGE, _by_setup(large), strict=True)
    ]
    columns = " | ".join(["lengths", "ranks", "stages", *ALGORITHMS, "CPU ms of auto"])
    return [
        "# Plans for a pipeline",
        "",
        "Made by `python -m benchmarks.planner.pipelines`, which says what is planned; do not edit. Predicted time",
        f"over the bound, mean over {num_batches} batches (micro-batches of a rank):",
        "",
        table(columns, by_setup),
        "",
        "A cap above the longest sample, for `auto`: predicted time over that with a cap at the longest sample, in",
        "all these setups. Larger micro-batches are fewer, and their bubble is longer.",
        "",
        table("cap, longest samples | least | mean | most", by_cap, align="rrrr"),
        "",
        "Large batches, one each, servegen_mlarge in 8 stages: time over the bound, and CPU milliseconds to plan.",
        "",
        table(" | ".join(["samples", "ranks", *ALGORITHMS]), by_size, align="rr" + "r" * len(ALGORITHMS)),
    ]


if __name__ == "__main__":
    sys.exit(main())
