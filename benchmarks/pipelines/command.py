"""Plans of pipelines over annealed references, which are kept as numbers: their lengths and costs do not change.

A reference is the best of simulated annealing from this package's plan and from longest first in five numbers of
micro-batches, 250,000 exchanges each, judged by exact makespans in the order of Megatron's functions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from benchmarks.planner.setups import add_length_options, draw_lengths, lengths_folder, lengths_said
from benchmarks.publish import ROOT, Measured, made_by, published, say, table
from megatron_balance import CostModel, Limits, Topology
from megatron_balance.planner import Batch, Problem, batch_of
from megatron_balance.planner.pipeline_packing import EFFORT, plan_pipeline

TITLE = "Pipelines"

REFERENCES = ROOT / "benchmarks" / "pipelines" / "references.json"
"""Makespans for lengths from files; for those of the fits tests/planner/golden.json has some."""

BARS = {EFFORT: 1.05, 4 * EFFORT: 1.03}
"""The largest distance from the reference at each effort."""

# Training FLOPs of a token over those of a squared token, of an 8B dense model and of a 30B mixture of experts.
DENSE = CostModel(linear=49_000, quadratic=1, per_microbatch=128 * 49_000)
EXPERTS = CostModel(linear=6_162, quadratic=1, expert_linear=9_244, per_microbatch=128 * 15_406)


class Cell(NamedTuple):
    lengths: str
    dp_size: int
    pp_size: int
    vpp_size: int
    ep_size: int
    count: int
    cap: int = 16384

    def batch(self, lengths: Any) -> Batch:
        group = self.pp_size if self.vpp_size > 1 else 1
        topology = Topology(
            self.dp_size,
            pp_size=self.pp_size,
            vpp_size=self.vpp_size,
            ep_size=self.ep_size,
            microbatch_multiple=group,
        )
        model = EXPERTS if self.ep_size > 1 else DENSE
        batch = batch_of(Problem.of(lengths, cost_model=model, topology=topology, limits=Limits(self.cap)))
        assert isinstance(batch, Batch)
        return batch

    def __str__(self) -> str:
        experts = f" EP{self.ep_size}" if self.ep_size > 1 else ""
        chunks = f" VPP{self.vpp_size}" if self.vpp_size > 1 else ""
        return f"{self.lengths} DP{self.dp_size}{experts} PP{self.pp_size}{chunks}, {self.count}"


CELLS = (
    Cell("code_files", 4, 4, 1, 1, 128),
    Cell("servegen_mlarge", 4, 8, 1, 1, 256),
    Cell("azure_conv", 8, 8, 1, 1, 96),
    Cell("reasoning_gym", 4, 4, 1, 1, 40),
    Cell("mooncake_synthetic", 4, 4, 2, 1, 128),
    Cell("tau_airline", 8, 4, 2, 1, 120),
    Cell("code_files", 4, 8, 2, 1, 256),
    Cell("servegen_mlarge", 4, 4, 4, 1, 128),
    Cell("azure_conv", 4, 8, 4, 1, 256),
    Cell("reasoning_gym", 8, 4, 1, 8, 256),
    Cell("servegen_mlarge", 16, 4, 1, 8, 512),
    Cell("gsm8k_sft", 16, 4, 1, 8, 512, 8192),
    Cell("azure_conv", 16, 4, 1, 16, 512),
    Cell("tau_airline", 16, 8, 1, 16, 512),
    Cell("servegen_mlarge", 64, 4, 1, 64, 512),
    Cell("reasoning_gym", 16, 8, 1, 16, 128),
    Cell("code_files", 8, 4, 2, 8, 256),
    Cell("azure_conv", 16, 4, 2, 16, 512),
    Cell("mooncake_synthetic", 16, 8, 2, 16, 512),
    Cell("servegen_mlarge", 8, 4, 4, 8, 256),
    Cell("alpaca_eval", 8, 4, 2, 8, 64),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--measured", action="store_true", help="train pipelines on CPU ranks; plans stay published")
    add_length_options(parser)


def measure(args: argparse.Namespace) -> Measured:
    """Plans every cell that has a reference at two efforts; or measures gains of runs."""
    known = published("pipelines")
    if args.measured:
        from benchmarks.pipelines.measured import measure_gains

        made = made_by("python -m benchmarks pipelines --measured")
        return Measured(known | {"measured": measure_gains(), "measured_made": made})
    folder = lengths_folder(args)
    golden = json.loads((ROOT / "tests" / "planner" / "golden.json").read_text())["annealed"]
    references = golden if folder is None else json.loads(REFERENCES.read_text())
    rows: dict[str, list[float]] = {}
    for cell in (cell for cell in CELLS if str(cell) in references):
        batch = cell.batch(draw_lengths(cell.lengths, num_samples=cell.count, longest=cell.cap, folder=folder))
        reference, times, seconds = references[str(cell)], list[float](), list[float]()
        for effort in BARS:
            start = time.process_time()
            plan = plan_pipeline(batch, effort=effort)
            seconds.append(time.process_time() - start)
            times.append(batch.time(plan.microbatch_of, plan.cp_sizes) / reference)
        rows[str(cell)] = [*times, batch.lower_bound() / reference, seconds[0], plan.cp_sizes.shape[1]]
        say(f"{cell}: {rows[str(cell)]}")
    problems = [
        f"{name} is {row[index]:.3f} of the reference at effort {effort}, above {bar}"
        for name, row in rows.items()
        for index, (effort, bar) in enumerate(BARS.items())
        if row[index] > bar
    ]
    runs = {name: known[name] for name in ("measured", "measured_made") if name in known}
    return Measured({"lengths": lengths_said(folder), "cells": rows} | runs, raw=rows, problems=problems)


def section(figures: Mapping[str, Any]) -> str:
    rows, columns = figures["cells"], list(zip(*figures["cells"].values(), strict=True))
    lines = [
        [name, *(f"{value:.3f}" for value in row[:3]), f"{row[3]:.2f}", f"{row[4]:.0f}"] for name, row in rows.items()
    ]
    for word, function in (("mean", statistics.mean), ("worst", max)):
        ratios = (f"{function(column):.3f}" for column in columns[:2])
        lines.append([f"**{word}**", *ratios, "", f"{function(columns[3]):.2f}", ""])
    header = "cell, samples | plan | 4 × the effort | bound | CPU s | micro-batches"
    return f"""Time of a plan over that of a reference: the best that simulated annealing found from a plan and from
longest first in five numbers of micro-batches (250,000 exchanges each), once, judged by exact makespans in the order
of Megatron's own functions. {figures["lengths"].capitalize()}. *Bound*: the lower bound over the reference; it counts
empty micro-batches only, so it says little. Annealing is weak where experts meet: long runs gained another 1 to 4 %
there.

{table(header, lines)}{_measured(figures)}"""


def _measured(figures: Mapping[str, Any]) -> str:
    gains, made = figures.get("measured", {}), figures.get("measured_made", {})
    if not gains:
        return ""
    rows = [[name, f"{gain['predicted']:.3f}", f"{gain['measured']:.3f}"] for name, gain in gains.items()]
    return f"""

Gain of balancing over packing on CPU ranks (`--measured`, {made["date"]}, revision {made["revision"]}; DP2), where the
last stage has the output layer. Measured: each pass is timed by its thread, and events in Megatron's order make the
makespan of these times. Predicted: by seconds fitted to the record of the first row.

{table("layout | predicted | measured", rows)}"""
