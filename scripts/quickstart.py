"""See it work, without a GPU: the same training under three policies, side by side.

Trains a small model with Megatron's own loop on two data-parallel ranks, on the functions and classes of
Python's standard library: stock, with --balance-data, and with --balance-data --balance-by-flops. In three runs the
policies take turns, step by step (policy_turns.py); a fourth has all flags in every step, as a user sets them.
Prints one table, writes build/quickstart/result.json, draws the fourth run's record as
build/quickstart/report.html, and fails where balancing changes a loss.
"""

from __future__ import annotations

import functools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from policy_turns import POLICIES
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn
from rich.table import Table
from rounding import ALLOWANCES
from sft_dataset import SftDataset, builtin_samples
from training_run import ENVIRONMENT, RECORD_STEPS, ROOT, Recorded, largest_difference, train

from megatron_balance import CostModel, Limits, ModelShape, Topology
from megatron_balance.cost.calibration import Calibration
from megatron_balance.planner import ScheduleMetrics, assignment_metrics
from megatron_balance.record import read_record
from megatron_balance.report.page import write_report

OUT = ROOT / "build" / "quickstart"
NUM_RANKS = 2
GLOBAL_BATCH_SIZE = 24
SEQ_LENGTH = 4096
TRAIN_ITERS = 14
WARM_UP_STEPS = 2  # the first steps pay for allocations
SEED = 5  # of the order of samples; over others stock's busiest rank plans 1.18 to 1.38 times the mean
MAX_LOSS_DIFFERENCE = ALLOWANCES["fp32"].loss

SHAPE = ModelShape(
    hidden_size=128,
    num_layers=2,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=32,
    ffn_hidden_size=384,
    gated_linear_unit=True,
    padded_vocab_size=257,
)
FLAGS = (
    f"--num-layers {SHAPE.num_layers} --hidden-size {SHAPE.hidden_size} --kv-channels {SHAPE.kv_channels} "
    f"--num-attention-heads {SHAPE.num_attention_heads} --num-query-groups {SHAPE.num_query_groups} "
    f"--ffn-hidden-size {SHAPE.ffn_hidden_size} --seq-length {SEQ_LENGTH} --max-position-embeddings {SEQ_LENGTH} "
    f"--global-batch-size {GLOBAL_BATCH_SIZE} --train-iters {TRAIN_ITERS} --seed {SEED}"
).split()

Ranks = list[list[list[int]]]
"""For every rank, for every micro-batch: positions of its samples in the step."""

PACKED = f"--use-dynamic-batch-size --max-tokens-per-gpu {SEQ_LENGTH}"
BALANCED = f"{PACKED} --balance-data --balance-by-flops"
RECORD = OUT / "record"


def main() -> int:
    """Train under each policy, compare, and report; the exit code says whether the losses agree."""
    console = Console()
    console.width = max(console.width, 100)  # a pipe has no width; the table needs one
    turns = [_train(first, console=console) for first in range(len(POLICIES))]
    runs = {policy: _under(policy, turns) for policy in POLICIES}
    every_step = _train(None, console=console)
    calibration = _fitted_costs()
    rest = _seconds_besides_passes(every_step)
    policies = {name: _figures(run, calibration=calibration, rest=rest) for name, run in runs.items()}
    result: dict[str, dict[str, Any]] = {"policies": policies}
    stock = policies["stock"]
    for figures in policies.values():
        figures["cpu_speedup"] = stock["busiest_cpu_seconds"] / figures["busiest_cpu_seconds"]
        figures["predicted_speedup"] = stock["predicted_cpu_seconds"] / figures["predicted_cpu_seconds"]
    differences = {name: largest_difference(run, reference=runs["stock"], key="lm_loss") for name, run in runs.items()}
    alone = largest_difference(every_step, reference=runs["stock"], key="lm_loss")
    differences["balance_by_flops"] = max(differences["balance_by_flops"], alone)
    for name, difference in differences.items():
        policies[name]["max_loss_difference_to_stock"] = difference
    (OUT / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    _print_table(result["policies"], console=console)
    console.print(f"Written to {(OUT / 'result.json').relative_to(ROOT)}")
    page = write_report(RECORD, out=OUT / "report.html")
    console.print(f"Steps rank by rank, before and after: open {page.relative_to(ROOT)} in a browser")
    worst = max(differences.values())
    if worst > MAX_LOSS_DIFFERENCE:
        console.print(f"[red]A loss differs from stock by {worst:.1e} relatively: more than {MAX_LOSS_DIFFERENCE:.1e}.")
        return 1
    return 0


def _train(first_policy: int | None, *, console: Console) -> Recorded:
    """Policies by turns, the first step under this one; None: all flags in every step, and a record of the run."""
    name = "all flags" if first_policy is None else f"by turns, {POLICIES[first_policy]} first"
    flags = BALANCED.split()
    if first_policy is None:
        out, script, environment = OUT / "all_flags", RECORD_STEPS, {}
        flags += ["--balance-record", str(RECORD)]
    else:
        out, script = OUT / f"turns{first_policy}", RECORD_STEPS.with_name("policy_turns.py")
        environment = {"FIRST_POLICY": str(first_policy)}
        flags += ["--no-balance-overlap"]
    columns = (SpinnerColumn(), *Progress.get_default_columns()[:2], TimeElapsedColumn())
    started = time.monotonic()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"{name}: starting", total=TRAIN_ITERS)

        def show(line: str) -> None:
            iteration = re.search(r"iteration\s+(\d+)/", line)
            if iteration:
                progress.update(task, completed=int(iteration[1]), description=f"{name}: training")

        run = train(out, [*FLAGS, *flags], num_ranks=NUM_RANKS, script=script, environment=environment, on_line=show)
    console.print(f"{name}: {TRAIN_ITERS} steps in {time.monotonic() - started:.0f} s with start-up")
    return run


def _under(policy: str, turns: Sequence[Recorded]) -> Recorded:
    """The steps of one policy, each from the run in which it was that policy's turn; also written to OUT / policy."""
    steps_of_ranks = [
        [next(step for step in versions if step["policy"] == policy) for versions in zip(*runs, strict=True)]
        for runs in zip(*(run.ranks for run in turns), strict=True)
    ]
    folder = OUT / policy
    folder.mkdir(parents=True, exist_ok=True)
    for rank, steps in enumerate(steps_of_ranks):
        (folder / f"rank{rank}.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    return Recorded(steps_of_ranks, output="")


def _fitted_costs() -> Calibration:
    """The seconds of the recorded run's micro-batches, as a user would fit them to the first steps of a training."""
    path = OUT / "seconds.json"
    command = [sys.executable, "-m", "megatron_balance", "fit", str(RECORD), "--out", str(path)]
    subprocess.run(command, env=os.environ | ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)
    return Calibration.read(path)


def _seconds_besides_passes(run: Recorded) -> float:
    """CPU seconds of a rank in a step besides its micro-batches: the optimizer, gradient reduction, moving samples."""
    in_step = [[step["cpu_seconds"] for step in rank[WARM_UP_STEPS:]] for rank in run.ranks]
    in_passes = [step.seconds.sum(axis=1) for step in read_record(RECORD).steps[WARM_UP_STEPS:]]
    return statistics.mean(map(statistics.mean, in_step)) - float(np.mean(in_passes))


def _figures(run: Recorded, *, calibration: Calibration, rest: float) -> dict[str, Any]:
    """Figures of one run for the table and result.json. Means are over the steps after the warm-up."""
    steps = run.steps
    plans = [_plan(index, step) for index, step in enumerate(steps)]
    metrics = [_metrics(*plan) for plan in plans]
    return {
        "step_seconds": statistics.mean(step["seconds"] for step in steps[WARM_UP_STEPS:]),
        "busiest_cpu_seconds": statistics.mean(
            max(step["cpu_seconds"] for step in ranks)
            for ranks in zip(*(rank[WARM_UP_STEPS:] for rank in run.ranks), strict=True)
        ),
        "predicted_cpu_seconds": statistics.mean(
            rest + _predicted_seconds(*plan, calibration=calibration) for plan in plans[WARM_UP_STEPS:]
        ),
        "cpu_seconds_besides_passes": rest,
        "cpu_seconds_per_rank": [
            statistics.mean(step["cpu_seconds"] for step in rank[WARM_UP_STEPS:]) for rank in run.ranks
        ],
        "planned_max_over_mean": statistics.mean(step.step_imbalance for step in metrics),
        "planned_over_bound": statistics.mean(step.over_bound for step in metrics),
        "lm_loss": [step["lm_loss"] for step in steps],
        "grad_norm": [step["grad_norm"] for step in steps],
        "num_microbatches": [step["num_microbatches"] for step in steps],
    }


def _plan(index: int, step: dict[str, Any]) -> tuple[list[int], Ranks]:
    """Lengths of a step's samples, and the samples of every micro-batch of every rank."""
    if "ranks" in step:
        return step["lengths"], step["ranks"]
    first = index * GLOBAL_BATCH_SIZE
    lengths = [_dataset().length(first + sample) for sample in range(GLOBAL_BATCH_SIZE)]
    # Megatron's sampler deals samples out one by one: sample i of a step goes to rank i % dp_size.
    return lengths, [[[sample] for sample in range(rank, GLOBAL_BATCH_SIZE, NUM_RANKS)] for rank in range(NUM_RANKS)]


def _predicted_seconds(lengths: list[int], ranks: Ranks, *, calibration: Calibration) -> float:
    """Forward and backward passes of the busiest rank."""
    return max(sum(calibration([lengths[sample] for sample in slot]) for slot in slots if slot) for slots in ranks)


def _metrics(lengths: list[int], ranks: Ranks) -> ScheduleMetrics:
    """Balance of a step by FLOPs, whatever its policy counted."""
    return assignment_metrics(
        ranks,
        lengths=lengths,
        cost_model=CostModel.from_shape(SHAPE),
        topology=Topology(NUM_RANKS),
        limits=Limits(SEQ_LENGTH),
    )


@functools.cache
def _dataset() -> SftDataset:
    """The rows that every run trains on."""
    return SftDataset(
        builtin_samples(),
        num_samples=TRAIN_ITERS * GLOBAL_BATCH_SIZE,
        seq_length=SEQ_LENGTH,
        pad_to_seq_length=False,
        pad_token=0,
        seed=SEED,
    )


def _print_table(policies: dict[str, dict[str, Any]], *, console: Console) -> None:
    table = Table(
        box=SIMPLE_HEAD,
        title=f"{NUM_RANKS} ranks, {GLOBAL_BATCH_SIZE} samples a step, at most {SEQ_LENGTH} tokens each",
    )
    for heading in (
        "policy",
        "step\nseconds",
        "busiest rank\nCPU seconds",
        "planned\nmax/mean",
        "micro-\nbatches",
        "speed",
        "speed\npredicted",
        "loss off\nby",
    ):
        table.add_column(heading, justify="left" if heading == "policy" else "right", no_wrap=True)
    for name, figures in policies.items():
        counts = sorted(set(figures["num_microbatches"]))
        table.add_row(
            name,
            f"{figures['step_seconds']:.3f}",
            f"{figures['busiest_cpu_seconds']:.3f}",
            f"{figures['planned_max_over_mean']:.4f}",
            f"{counts[0]}–{counts[-1]}" if len(counts) > 1 else str(counts[0]),
            f"{figures['cpu_speedup']:.2f}x",
            f"{figures['predicted_speedup']:.2f}x",
            f"{figures['max_loss_difference_to_stock']:.1e}",
        )
    console.print(table)
    stock = policies["stock"]
    for name, figures in policies.items():
        if name != "stock":
            wall = stock["step_seconds"] / figures["step_seconds"]
            console.print(
                f"{name} against stock: {wall:.2f}x by the clock, {figures['cpu_speedup']:.2f}x by CPU seconds of the "
                f"busiest rank, {figures['predicted_speedup']:.2f}x predicted by seconds fitted to the recorded run"
            )


if __name__ == "__main__":
    sys.exit(main())
