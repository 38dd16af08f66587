"""Seconds and loss of evaluation, stock against balanced, on the same rows.

scripts/bench_evaluation.sh                              some minutes
scripts/bench_evaluation.sh --out benchmarks/results     what is committed
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from forked import import_once, train_forked
from training_run import ROOT

from benchmarks.evaluation.rows import VOCAB_SIZE, write_rows
from benchmarks.markdown import table
from benchmarks.planner.options import add_options, lengths_folder
from benchmarks.results_file import made_by, page_head, versions_of, write_results
from megatron_balance.cost.model import CostModel
from megatron_balance.lengths.read import read_lengths, synthetic_lengths
from megatron_balance.model.shape import ModelShape

COMMAND = "scripts/bench_evaluation.sh"
NUM_ROWS, NUM_ITERATIONS, NUM_EVALUATIONS = 32, 4, 6
"""Rows of an iteration, iterations of an evaluation, and evaluations of a run, the last one after training."""

SHAPE = ModelShape(
    hidden_size=128,
    num_layers=4,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=32,
    ffn_hidden_size=384,
    padded_vocab_size=VOCAB_SIZE,
    gated_linear_unit=True,
)
FLAGS = (
    f"--num-layers {SHAPE.num_layers} --hidden-size {SHAPE.hidden_size} --ffn-hidden-size {SHAPE.ffn_hidden_size} "
    f"--num-attention-heads {SHAPE.num_attention_heads} --num-query-groups {SHAPE.num_query_groups} "
    f"--global-batch-size 4 --train-iters {NUM_EVALUATIONS - 1} --eval-interval 1 "
    f"--eval-iters {NUM_ITERATIONS} --eval-global-batch-size {NUM_ROWS}"
)
WAYS = {"stock": "", "balanced": "--use-dynamic-batch-size --balance-data --balance-by-flops"}


@dataclass(frozen=True)
class Case:
    """Rows and the ranks that evaluate them.

    Attributes:
        lengths: name of the set of lengths.
        seq_length: of the longest row, and the cap of a balanced micro-batch, tokens.
        layout: name of the layout.
        flags: of the layout.
        num_ranks: of the run.
    """

    lengths: str
    seq_length: int
    layout: str = "DP4"
    flags: str = ""
    num_ranks: int = 4


CASES = (
    Case("alpaca_eval", 2048),
    Case("reasoning_gym", 4096),
    Case("gsm8k_sft", 512, "DP2, PP2", "--pipeline-model-parallel-size 2"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, print, write. The exit status is 1 where losses differ.

    Args:
        arguments: of the command line; None takes the process's own.
    """
    parser = argparse.ArgumentParser(prog=COMMAND, description=str(__doc__).splitlines()[0])
    add_options(parser, command=COMMAND)
    args = parser.parse_args(arguments)
    lengths = lengths_folder(args)
    folder = ROOT / "build" / "bench" / "runs" / "evaluation"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    import_once()
    cases = [
        {"lengths": case.lengths, "seq_length": case.seq_length, "layout": case.layout}
        | {"ways": _ways(case, folder=folder / str(index), lengths_folder=lengths)}
        for index, case in enumerate(CASES)
    ]
    result = made_by(args.command, real_lengths=lengths is not None, cases=cases)
    sys.stdout.write(write_results("evaluation", result, report=report, out=args.out))
    return int(any(loss_difference(case["ways"]) > 1e-6 for case in cases))


def _ways(case: Case, *, folder: Path, lengths_folder: Path | None) -> dict[str, dict[str, Any]]:
    """Figures of the stock and the balanced run on rows of the same lengths."""
    folder.mkdir()
    num_rows = NUM_ROWS * NUM_ITERATIONS * NUM_EVALUATIONS
    if lengths_folder is None:
        drawn = synthetic_lengths(case.lengths, num_samples=2 * num_rows, seed=0)
    else:
        drawn = read_lengths(lengths_folder / f"{case.lengths}.npz", key="length")
    kept = np.random.default_rng(0).permutation(drawn[drawn <= case.seq_length])[:num_rows]
    rows = write_rows(folder / "rows.jsonl", lengths=kept, seed=0)
    common = (
        f"{FLAGS} {case.flags} --seq-length {case.seq_length} --max-position-embeddings {case.seq_length} "
        f"--train-data-path {rows} --valid-data-path {rows}"
    )
    caps = {"stock": "", "balanced": f"--max-tokens-per-gpu {case.seq_length}"}
    return {
        way: _measured(folder / way, flags=f"{common} {flags} {caps[way]}", num_ranks=case.num_ranks)
        for way, flags in WAYS.items()
    }


def _measured(record: Path, *, flags: str, num_ranks: int) -> dict[str, Any]:
    """Figures of a run: medians over its evaluations, without the first, and of all of them the losses."""
    run = train_forked(
        record, flags.split(), num_ranks=num_ranks, timeout_seconds=1200, module="benchmarks.evaluation.recorded"
    )
    ranks = [[row for row in rows if "evaluation" in row] for rows in run.recorded.ranks]
    evaluations = list(zip(*ranks, strict=True))[1:]
    last_stages = [rows for rows in ranks if rows[0]["evaluation"]]
    return {
        "seconds": median(max(row["seconds"] for row in rows) for rows in evaluations),
        "busiest_cpu_seconds": median(max(row["cpu_seconds"] for row in rows) for rows in evaluations),
        "all_cpu_seconds": median(sum(row["cpu_seconds"] for row in rows) for rows in evaluations),
        "busiest_to_mean": busiest_to_mean([[row["lengths"] for row in rows] for rows in last_stages]),
        "tokens": sum(sum(map(sum, row["lengths"])) for rows in last_stages for row in rows),
        "losses": [row["evaluation"]["lm loss"] for row in last_stages[0]],
    }


def busiest_to_mean(ranks: Sequence[Sequence[Sequence[Sequence[int]]]]) -> float:
    """FLOPs of the busiest rank over the mean, summed over iterations, after each of which ranks meet.

    Args:
        ranks: for each data-parallel rank, evaluation and iteration the lengths of the sequences that it ran, tokens.
    """
    cost = CostModel.from_shape(SHAPE)
    of_ranks = np.array([[sum(map(cost, lengths)) for rows in rank for lengths in rows] for rank in ranks], dtype=float)
    return float(of_ranks.max(axis=0).sum() / of_ranks.mean(axis=0).sum())


def loss_difference(ways: Mapping[str, Mapping[str, Any]]) -> float:
    """Largest relative difference of a loss."""
    pairs = zip(ways["balanced"]["losses"], ways["stock"]["losses"], strict=True)
    return max(abs(ours - stock) / stock for ours, stock in pairs)


def report(result: Mapping[str, Any]) -> str:
    """The page of a result."""
    rows = [
        (
            f"{case['layout']}, {case['lengths']}",
            *(_change(case["ways"], figure) for figure in ("seconds", "busiest_cpu_seconds", "all_cpu_seconds")),
            _change(case["ways"], "busiest_to_mean", ratio=False),
            f"{case['ways']['stock']['tokens'] / case['ways']['balanced']['tokens']:.2f}",
            f"{loss_difference(case['ways']):.0e}",
        )
        for case in result["cases"]
    ]
    columns = (
        "layout, lengths | seconds | CPU seconds of the busiest rank | of all ranks | FLOPs of the busiest rank / mean "
        "| tokens, stock / balanced | largest difference of the loss"
    )
    sizes = ", ".join(f"{case['lengths']} to {case['seq_length']:,} tokens" for case in result["cases"])
    lengths = "Real lengths" if result["real_lengths"] else "Lengths drawn from the built-in fits"
    return f"""{page_head("Evaluation", f"{result['command']} --out benchmarks/results")}
One evaluation of {NUM_ITERATIONS} iterations of {NUM_ROWS} rows, a model of {SHAPE.num_layers} layers of width
{SHAPE.hidden_size}. {lengths} ({sizes}; longer samples
are left out), random tokens, one sample a row and a micro-batch in stock Megatron; stock → balanced by FLOPs with a cap
as long as the longest row. Under PP stock rows are padded to that length, as Megatron needs there. Medians over the
{NUM_EVALUATIONS - 1} evaluations of a run but the first; losses of all. On a CPU with fewer cores than ranks, so that
CPU seconds say more than seconds. Ranks meet after each iteration: FLOPs of the busiest are summed over iterations, as
the planner counts them.
{versions_of(result)}.

{table(columns, rows)}
"""


def _change(ways: Mapping[str, Mapping[str, Any]], figure: str, *, ratio: bool = True) -> str:
    stock, ours = (ways[way][figure] for way in WAYS)
    return f"{stock:.2f} → {ours:.2f}" + (f" ({stock / ours:.2f}×)" if ratio else "")


if __name__ == "__main__":
    sys.exit(main())
