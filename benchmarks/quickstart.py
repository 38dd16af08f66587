"""What `make quickstart` wrote to build/quickstart/result.json: `scripts/bench quickstart --publish` after it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from benchmarks.publish import ROOT, Measured, table

TITLE = "Quickstart"

RESULT = ROOT / "build" / "quickstart" / "result.json"

FLAGS = {
    "stock": "stock",
    "packed": "`--use-dynamic-batch-size`",
    "balance-data": "and `--balance-data`",
    "by-flops": "and `--balance-by-flops`",
    "dynamic-cp": "and `--balance-dynamic-cp`",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--note", default="", help="a sentence: what else the machine ran")


def measure(args: argparse.Namespace) -> Measured:
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    kept = {
        name: {key: value for key, value in figures.items() if key not in ("cpu_seconds", "num_microbatches")}
        for name, figures in result["policies"].items()
    }
    return Measured({"policies": kept, "fit_error": result["fit_error"], "note": args.note}, raw=result)


def section(figures: Mapping[str, Any]) -> str:
    policies = figures["policies"]
    before, packed, last = policies["stock"], policies["packed"], policies["dynamic-cp"]
    rows: list[list[str]] = []
    for name, one in policies.items():
        speeds = [one["cpu_speedup"], one["predicted_speedup"], one["cpu_speedup"] / before["cpu_speedup"]]
        speeds.append(one["cpu_speedup"] / packed["cpu_speedup"])
        seconds = [f"{one['busiest_cpu_seconds']:.2f}", f"{one['planned_max_over_mean']:.4f}"]
        rows.append(
            [FLAGS[name], *seconds, *(f"{speed:.2f}×" for speed in speeds), f"{one['max_loss_difference']:.1e}"]
        )
        before = one
    columns = "policy | busiest rank, CPU s a step | planned max/mean | speed over stock | predicted, at most"
    return f"""Four CPU ranks on one core, a GPT of one layer on functions of Python's standard library, 24 samples
a step, at most 4,096 tokens each; every global batch under every policy, step by step in turn; CPU seconds of the
busiest rank, means of 5 steps that ran twice, of which the lesser counts. *Predicted*: forward and backward
alone, by seconds that `megatron-balance fit` learnt from four other batches of the run (off by
{figures["fit_error"]:.1%} on steps that were not fitted);
{last["outside_cpu_seconds"] / last["busiest_cpu_seconds"]:.0%} of a step with all flags is outside of both. The losses
of a second run, under all flags, are compared step by step. {figures["note"]}

{table(f"{columns} | over the row above | over packing | largest loss difference", rows)}"""
