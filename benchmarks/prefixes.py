"""Training on rollouts of prompts, on four CPU ranks: stock, balanced, and with `--balance-share-prefixes` too.

A step is 16 prompts with 8 responses each, of real lengths; every policy trains on the same rows in the same order and
from the same weights. Predicted is the gain by FLOPs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from collections.abc import Mapping
from typing import Any

import forked
import numpy as np
from numpy.typing import NDArray
from training_run import Recorded, largest_difference

from benchmarks.planner.setups import add_length_options, draw_rollouts, lengths_folder
from benchmarks.publish import ROOT, Measured, table
from megatron_balance.record import read_record

TITLE = "Shared prefixes"

NUM_RANKS, GROUPS, RESPONSES, LONGEST, STEPS, WARM_UP = 4, 16, 8, 1024, 4, 1
FLAGS = (
    "--num-layers 2 --hidden-size 192 --num-attention-heads 6 --num-query-groups 2 --ffn-hidden-size 512 --seed 1 "
    f"--seq-length {LONGEST} --max-position-embeddings {LONGEST} --train-iters {STEPS} "
    f"--global-batch-size {GROUPS * RESPONSES}"
)
BALANCED = (
    f"--use-dynamic-batch-size --max-tokens-per-gpu {4 * LONGEST} --balance-data --balance-by-flops "
    "--balance-attention-rate 1"
)
SETS = ("reasoning_gym", "servegen_mlarge", "gsm8k_sft")
BAR = (0.9, 1.2)
"""Measured over predicted: on a CPU a pair of tokens in a rectangle costs less than in a causal square."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--sets", nargs="+", default=SETS, metavar="NAME", help="sets of lengths")
    add_length_options(parser)


def measure(args: argparse.Namespace) -> Measured:
    """Trains on rollouts of each set."""
    forked.import_once()
    folder, rows = ROOT / "build" / "bench" / "prefixes", dict[str, dict[str, float]]()
    shutil.rmtree(folder, ignore_errors=True)
    for name in args.sets:
        prompts, responses = draw_rollouts(
            name,
            groups=GROUPS,
            responses=RESPONSES,
            longest=LONGEST - 1,
            folder=lengths_folder(args),
            draw=np.random.default_rng(0),
        )
        responses = np.minimum(responses, LONGEST - 1 - prompts[:, None])
        (folder / name).mkdir(parents=True)
        _write(folder / name / "data.jsonl", prompts, responses)
        rows[name] = _compare(folder / name)
        sys.stderr.write(f"{name}: {rows[name]}\n")
    ratios = {name: row["measured"] / row["predicted"] for name, row in rows.items()}
    problems = [
        f"{name} gains {ratio:.2f} of what is predicted, not {BAR[0]} to {BAR[1]}"
        for name, ratio in ratios.items()
        if not BAR[0] <= ratio <= BAR[1]
    ]
    return Measured({"real": lengths_folder(args) is not None, "sets": rows}, raw=rows, problems=problems)


def _write(path: Any, prompts: NDArray[np.int64], responses: NDArray[np.int64]) -> None:
    draw = np.random.default_rng(1)
    with path.open("w") as out:
        for prompt, lengths in zip(prompts.tolist(), responses.tolist(), strict=True):
            shared = draw.integers(1, 257, prompt).tolist()
            for length in lengths:  # the last token is a label only
                row = {"tokens": shared + draw.integers(1, 257, length + 1).tolist()}
                out.write(json.dumps(row | {"loss_mask": [0] * prompt + [1] * (length + 1)}) + "\n")


def _compare(folder: Any) -> dict[str, float]:
    flags = {"stock": "", "balanced": BALANCED, "shared": f"{BALANCED} --balance-share-prefixes"}
    runs: dict[str, Recorded] = {}
    costs: dict[str, float] = {}
    for name, policy in flags.items():
        recorded = f"{policy} --balance-record {folder / name / 'record'}" if policy else ""
        runs[name] = _run(folder / name, f"--data-path {folder / 'data.jsonl'} {recorded}")
        if policy:
            steps = read_record(folder / name / "record").steps[WARM_UP:]
            costs[name] = statistics.mean(step.metrics().predicted_cost for step in steps)
            computed = steps[-1].metrics().computed_tokens / int(steps[-1].lengths.sum())
    measured = {name: _seconds(run) for name, run in runs.items()}
    return {
        **measured,
        "computed": computed,
        "predicted": costs["balanced"] / costs["shared"],
        "measured": measured["balanced"] / measured["shared"],
        "loss_difference": largest_difference(runs["shared"], reference=runs["stock"], key="lm_loss"),
    }


def _run(folder: Any, flags: str) -> Recorded:
    folder.mkdir()
    return forked.train_forked(folder, f"{FLAGS} {flags}".split(), num_ranks=NUM_RANKS, timeout_seconds=1200)


def _seconds(run: Recorded) -> float:
    """CPU seconds of a step's passes on the busiest rank, the median step."""
    steps = list(zip(*run.ranks, strict=True))[WARM_UP:]
    return statistics.median(max(rank["passes_cpu_seconds"] for rank in ranks) for ranks in steps)


def section(figures: Mapping[str, Any]) -> str:
    """Markdown of the figures."""
    rows = [
        [
            name,
            *(f"{row[policy]:.2f}" for policy in ("stock", "balanced", "shared")),
            f"{row['computed']:.0%}",
            *(f"{row[gain]:.2f}×" for gain in ("measured", "predicted")),
            f"{row['measured'] / row['predicted']:.2f}",
            f"{row['loss_difference']:.1e}",
        ]
        for name, row in figures["sets"].items()
    ]
    lengths = "real lengths of prompts and responses" if figures["real"] else "lengths drawn from two lognormal ones"
    columns = "lengths | stock, CPU s | balanced | balanced and shared | tokens computed | gain of sharing | predicted"
    return f"""Four CPU ranks over gloo, a GPT of two layers, fp32; a step is {GROUPS} prompts with {RESPONSES}
responses each, {lengths} of fewer than {LONGEST} tokens together. CPU seconds of the forward and backward passes of
the busiest rank, the median of {STEPS - WARM_UP} steps. *Predicted*: by
the FLOPs that the runs were planned with. No GPU has run it.

{table(f"{columns} | measured / predicted | loss off by", rows)}"""
