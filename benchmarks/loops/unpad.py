"""CPU seconds of training steps on padded rows: stock, as packs, and as packs that are balanced.

scripts/bench_loops.sh unpad --out benchmarks/results
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from forked import import_once, train_forked
from training_run import ROOT

from benchmarks.markdown import table
from benchmarks.planner.options import add_options, lengths_folder
from benchmarks.planner.setups import draw_lengths
from benchmarks.results_file import made_by, page_head, versions_of, write_results
from megatron_balance.runtime.rank_seconds import busiest_over_mean

COMMAND = "scripts/bench_loops.sh unpad"
LENGTH_SETS = ("alpaca_eval", "reasoning_gym")
SEQ_LENGTH, GLOBAL_BATCH_SIZE, NUM_STEPS = 1024, 32, 6
FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 128 "
    f"--seq-length {SEQ_LENGTH} --max-position-embeddings {SEQ_LENGTH} --global-batch-size {GLOBAL_BATCH_SIZE} "
    "--micro-batch-size 2"
)
PACKED = f"--balance-unpad 0 --use-dynamic-batch-size --max-tokens-per-gpu {SEQ_LENGTH}"
WAYS = {"padded": "", "packed": PACKED, "packed, by FLOPs": f"{PACKED} --balance-data --balance-by-flops"}


def main() -> int:
    """Train, print, write."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.splitlines()[0])
    add_options(parser, command=f"{COMMAND} --out benchmarks/results")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="of each run; the first is left out")
    args = parser.parse_args()
    folder = ROOT / "build" / "bench" / "runs" / "unpad"
    shutil.rmtree(folder, ignore_errors=True)
    import_once()
    num_samples = args.steps * GLOBAL_BATCH_SIZE
    sets: dict[str, Any] = {}
    for name in LENGTH_SETS:
        lengths = draw_lengths(name, num_samples=num_samples, longest=SEQ_LENGTH, folder=lengths_folder(args))
        data = write_rows(folder / f"{name}.jsonl", lengths)
        sets[name] = {
            "real_tokens": int(lengths.sum()) / (num_samples * SEQ_LENGTH),
            "ways": {
                way: measured(
                    folder / name / way.replace(", ", "-"), flags=f"{flags} --data-path {data}", num_steps=args.steps
                )
                for way, flags in WAYS.items()
            },
        }
    synthetic = lengths_folder(args) is None
    result = made_by(args.command, synthetic=synthetic, num_steps=args.steps, sets=sets)
    sys.stdout.write(write_results("unpad", result, report=report, out=args.out))
    return 0


def write_rows(path: Path, lengths: Sequence[int]) -> Path:
    """A jsonl file of samples of these lengths, with random tokens that are all learned."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    with path.open("w") as out:
        for length in lengths:
            out.write(json.dumps({"tokens": rng.integers(1, 256, int(length) + 1).tolist()}) + "\n")
    return path


def measured(record: Path, *, flags: str, num_steps: int) -> dict[str, Any]:
    """Figures of a run on two data-parallel ranks: medians over its steps, without the first, and their losses."""
    run = train_forked(
        record,
        f"{FLAGS} --train-iters {num_steps} {flags}".split(),
        num_ranks=2,
        timeout_seconds=600,
        module="benchmarks.loops.padded_training",
    )
    seconds = np.array([[row["cpu_seconds"] for row in rows[1:]] for rows in run.recorded.ranks])
    return {
        "busiest_cpu_seconds": float(np.median(seconds.max(0))),
        "all_cpu_seconds": float(np.median(seconds.sum(0))),
        "busiest_over_mean": busiest_over_mean(seconds),
        "losses": [row["lm_loss"] for row in run.recorded.steps],
    }


def report(result: Mapping[str, Any]) -> str:
    """The page of the results."""
    rows = []
    for name, of_set in result["sets"].items():
        stock = of_set["ways"]["padded"]
        for way, figures in of_set["ways"].items():
            pairs = zip(figures["losses"], stock["losses"], strict=True)
            difference = max(abs(one - other) / other for one, other in pairs)
            rows.append(
                (
                    f"{name} ({of_set['real_tokens']:.0%} of tokens are real)",
                    way,
                    *(
                        f"{figures[key]:.2f} ({stock[key] / figures[key]:.2f}×)"
                        for key in ("busiest_cpu_seconds", "all_cpu_seconds")
                    ),
                    f"{figures['busiest_over_mean']:.2f}",
                    f"{difference:.0e}",
                )
            )
    columns = "lengths | rows | CPU seconds of the busiest rank | of both ranks | busiest/mean | difference of the loss"
    source = "drawn from the built-in fits of the length sets" if result["synthetic"] else "of the length sets"
    return f"""{page_head("Padded rows", result["command"])}
Training steps of {GLOBAL_BATCH_SIZE} rows of {SEQ_LENGTH:,} tokens on two data-parallel ranks, lengths {source}:
padded in stock Megatron, two rows a micro-batch; as packs of at most {SEQ_LENGTH:,} tokens on the rank that loaded them
(`--balance-unpad 0 --use-dynamic-batch-size`); and moved between ranks by FLOPs. CPU seconds, medians over
{result["num_steps"] - 1} steps; in brackets, how many times fewer than padded. The last column is the largest relative
difference of a step's loss from the padded run. {versions_of(result)}.

{table(columns, rows, align="llrrrr")}
"""


if __name__ == "__main__":
    sys.exit(main())
