"""Compares training planned with measured seconds against FLOPs: the quickstart's training, both ways, in one run.

    scripts/bench_calibration.sh --out benchmarks/results

Calibrates each model on this machine's CPU, then trains it by FLOPs, by the calibration and with online calibration
in turn, several rounds. A round's ratio is the CPU seconds of the busiest rank over those by FLOPs in the same round:
rounds that the machine disturbed disturb both. Beside it stands the ratio that the calibration itself predicts.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quickstart import FLAGS, NUM_RANKS, PACKED, SEQ_LENGTH, WARM_UP_STEPS
from training_run import ROOT, Recorded, train

from benchmarks.markdown import table
from benchmarks.results_file import made_by, page_head, versions_of, write_results
from megatron_balance import Topology
from megatron_balance.cost.calibration import Calibration
from megatron_balance.planner.metrics import assignment_metrics
from megatron_balance.topology import Limits

MODEL_FLAGS = ["--group-query-attention", "--swiglu", "--vocab-size", "257", "--make-vocab-size-divisible-by", "1"]
NARROW = ["--hidden-size", "64", "--kv-channels", "16", "--ffn-hidden-size", "192"]
"""Half the quickstart's width: a model whose seconds on a CPU do not follow its FLOPs."""

MODELS = {"quickstart": FLAGS, "quickstart at half the width": [*FLAGS, *NARROW]}
BY_FLOPS = [*PACKED.split(), "--balance-data", "--balance-by-flops"]
STEPS_OF_ONLINE_WARM_UP = 8
"""By then online calibration was fitted twice."""


@dataclass(frozen=True)
class _Way:
    """One way to plan a run.

    Attributes:
        flags: beside those of the quickstart's balance_by_flops.
        first_step: the first that counts.
    """

    flags: tuple[str, ...]
    first_step: int = WARM_UP_STEPS


def main() -> int:
    """Calibrate, train, print, write."""
    parser = argparse.ArgumentParser(prog="scripts/bench_calibration.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench", help="folder of the results")
    parser.add_argument("--rounds", type=int, default=5, help="times each way trains (default: 5)")
    parser.add_argument("--steps", type=int, default=16, help="steps of a run (default: 16)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    shown = f"scripts/bench_calibration.sh --rounds {args.rounds} --steps {args.steps}"
    record = made_by(shown, models={})
    for name, flags in MODELS.items():
        record["models"][name] = _compare(name, flags, rounds=args.rounds, steps=args.steps, out=args.out)
        # After each model: a run that is cut short leaves what it has.
        write_results("calibration", record, report=_report, out=args.out)
    print(_report(record))
    return 0


def _compare(name: str, flags: list[str], *, rounds: int, steps: int, out: Path) -> dict[str, Any]:
    path = out / f"calibration_cpu_{name.replace(' ', '_')}.json"
    command = [sys.executable, "-m", "megatron_balance", "calibrate", "--device", "cpu", "--out", str(path)]
    subprocess.run([*command, "--max-tokens", str(SEQ_LENGTH), "--", *flags, *MODEL_FLAGS], check=True)
    calibration = Calibration.read(path)
    ways = {
        "FLOPs": _Way(()),
        "calibration": _Way(("--balance-calibration", str(path))),
        "online": _Way(("--balance-calibrate-online",), first_step=STEPS_OF_ONLINE_WARM_UP),
    }
    seconds: dict[str, list[list[float]]] = {way: [] for way in ways}
    foretold: dict[str, list[list[float]]] = {way: [] for way in ways}
    for index in range(rounds):
        for way_name, way in ways.items():
            run_flags = [*flags, "--train-iters", str(steps), *BY_FLOPS, *way.flags]
            run = train(ROOT / "build" / "bench" / "runs" / way_name, run_flags, num_ranks=NUM_RANKS)
            seconds[way_name].append(_busiest(run))
            foretold[way_name].append(_foretold(run, calibration=calibration))
        print(f"{name}: round {index + 1} of {rounds}", file=sys.stderr, flush=True)
    return {
        "held_out_error": calibration.held_out_error,
        "held_out_error_worst": calibration.origin["held_out_error_worst"],
        "crossover_tokens": calibration.linear / calibration.quadratic,
        "ways": {
            way_name: {
                "cpu_seconds_to_flops": _ratios(seconds[way_name], seconds["FLOPs"], first_step=way.first_step),
                "foretold_to_flops": _ratios(foretold[way_name], foretold["FLOPs"], first_step=way.first_step),
                "busiest_cpu_seconds": [statistics.mean(run[way.first_step :]) for run in seconds[way_name]],
            }
            for way_name, way in ways.items()
        },
    }


def _busiest(run: Recorded) -> list[float]:
    """CPU seconds of the busiest rank, step by step."""
    return [max(step["cpu_seconds"] for step in ranks) for ranks in zip(*run.ranks, strict=True)]


def _foretold(run: Recorded, *, calibration: Calibration) -> list[float]:
    """Seconds of the busiest rank as the calibration predicts them from the plan, step by step."""
    metrics = [
        assignment_metrics(
            step["ranks"],
            lengths=step["lengths"],
            cost_model=calibration.cost_model(),
            topology=Topology(NUM_RANKS),
            limits=Limits(SEQ_LENGTH),
        )
        for step in run.steps
    ]
    return [float(of_step.predicted_cost) for of_step in metrics]


def _ratios(ours: list[list[float]], theirs: list[list[float]], *, first_step: int) -> list[float]:
    """One for each round: the steps that count, over the same steps by FLOPs."""
    return [sum(run[first_step:]) / sum(other[first_step:]) for run, other in zip(ours, theirs, strict=True)]


def _report(record: dict[str, Any]) -> str:
    rows: list[tuple[str, ...]] = []
    for name, result in record["models"].items():
        for way, figures in result["ways"].items():
            ratios, foretold = figures["cpu_seconds_to_flops"], figures["foretold_to_flops"]
            rows.append(
                (
                    name,
                    f"{result['crossover_tokens']:.0f}",
                    f"{result['held_out_error']:.1%}",
                    way,
                    f"{statistics.median(ratios):.4f} ({min(ratios):.4f}–{max(ratios):.4f})",
                    f"{statistics.median(foretold):.4f}",
                )
            )
    columns = "model | crossover | off by, held out | plans with | CPU seconds to FLOPs' | foretold"
    return f"""{page_head("Seconds against FLOPs, in training", record["command"])}
- {record["environment"]["device"]}, {NUM_RANKS} ranks, one thread each; {versions_of(record)}
- CPU seconds of the busiest rank over those of planning by FLOPs in the same round: median (least to most)
- foretold: the same ratio by the calibration's own seconds; below 1 is faster

{table(columns, rows, align="lrrlrr")}
"""


if __name__ == "__main__":
    sys.exit(main())
