"""The rows of data that `compare` plans: of which kind, as far as they are planned, and in global batches.

The kind of stock follows from the file and `--seq-length`. Where neither says it, it is asked for.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_balance.cli.screen import in_a_line, progress
from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.lengths import MEGATRON_SEED, STOCKS, Rows, read_rows, stock_rows, synthetic_lengths
from megatron_balance.planner import Problem, resolve_objective
from megatron_balance.record import StepRecord
from megatron_balance.record.step import round_robin
from megatron_balance.topology import Limits, Topology

MAX_SAMPLES = 2**13  # planned without --steps, so that planning takes seconds
SYNTHETIC_STEPS = 10  # global batches of `synthetic:NAME` without N and --steps
DOCUMENTS = ("documents", "masked-documents")


def rows_to_plan(args: argparse.Namespace) -> tuple[str, Rows]:
    """The kind of stock, and its rows as far as they are planned, and one more."""
    if args.data not in (None, *STOCKS):
        raise BalanceError(f"--data is {args.data!r}: it must be one of {', '.join(STOCKS)}.")
    kind, size = args.data, args.global_batch_size
    limit = (args.steps or max(MAX_SAMPLES // size, 1)) * size + 1
    is_index = _is_index(args.lengths)
    in_order = args.shuffle is None and not is_index and kind not in DOCUMENTS
    rows = _rows(args, limit=limit if in_order else None)
    if kind is None and args.seq_length is not None and not is_index:
        kind = "packed" if (rows.counts != 1).any() else "padded"
    if kind is None:
        choice = " or ".join(DOCUMENTS) if is_index else "samples, or --seq-length N for the rows of --sft"
        raise BalanceError(
            f"{in_a_line(args.lengths)} does not say what stock trains on: give --data {choice} (compare --help)."
        )
    if (kind == "samples") != (args.seq_length is None):
        remedy = "leave out --seq-length" if kind == "samples" else "give Megatron's --seq-length, the tokens of a row"
        raise BalanceError(f"--data is {kind}: {remedy}.")
    if args.shuffle is not None and kind not in DOCUMENTS:
        rows = rows.permuted(np.random.default_rng(args.shuffle).permutation(rows.counts.size))
    if args.seq_length is None:
        return kind, rows
    seed = MEGATRON_SEED if args.shuffle is None else args.shuffle
    multiple = 1 if args.cp_size in (None, 1) else 2 * args.cp_size
    return kind, stock_rows(rows, kind=kind, seq_length=args.seq_length, seed=seed, limit=limit, multiple=multiple)


def _rows(args: argparse.Namespace, *, limit: int | None) -> Rows:
    """Rows of LENGTHS in its order, at most so many."""
    kind, *names = args.lengths.split(":")
    if kind != "synthetic" or not names:
        with progress(f"reading {in_a_line(args.lengths, length=40)}") as show:
            return read_rows(args.lengths, key=args.key, limit=limit, progress=show)
    if args.key is not None:
        raise BalanceError(f"--key is {args.key!r} and LENGTHS is {args.lengths!r}, which has no columns: drop --key.")
    if len(names) > 3 or not all(number.isdecimal() and len(number) < 20 for number in names[1:]):
        raise BalanceError(f"LENGTHS is {args.lengths!r}: it must be synthetic:NAME, :NAME:N or :NAME:N:SEED.")
    default = (args.steps or SYNTHETIC_STEPS) * args.global_batch_size
    num_samples, seed = map(int, [*names[1:], *(default, 0)[len(names) - 1 :]])
    return Rows.from_samples(synthetic_lengths(names[0], num_samples=min(num_samples, limit or num_samples), seed=seed))


def _is_index(path: str) -> bool:
    """The lengths are those of a Megatron data set, or of its prefix."""
    return path.lower().endswith(".idx") or (not Path(path).suffix and Path(f"{path}.idx").is_file())


def batches_of_rows(
    args: argparse.Namespace, *, stock: Rows, topology: Topology, limits: Limits
) -> Sequence[StepRecord]:
    """Whole global batches of rows."""
    size, counts, steps = args.global_batch_size, stock.counts, args.steps
    if steps is None:
        steps = min(max(MAX_SAMPLES // size, 1), max(counts.size // size, 1))
    if counts.size < steps * size:
        needs = f"{steps} steps of --global-batch-size {size} need {steps * size} rows"
        raise BalanceError(f"{needs}, but there are {counts.size}: lower it, or --steps.")
    objective, ends = resolve_objective("auto", topology=topology), np.concatenate([[0], np.cumsum(counts)])
    batches: list[StepRecord] = []
    for first in range(0, steps * size, size):
        rows = np.repeat(np.arange(size), counts[first : first + size])
        problem = Problem.of(
            stock.lengths[ends[first] : ends[first + size]],
            home_ranks=round_robin(size, dp_size=topology.dp_size)[rows],
            cost_model=CostModel.tokens(),
            topology=topology,
            limits=limits,
            objective=objective,
        )
        batches.append(
            StepRecord(
                **vars(problem),
                microbatch_of=np.zeros_like(rows),
                cp_size_grid=np.full((topology.dp_size, 1), topology.cp_size),
                iteration=1,
                rows=rows,
                row_tokens=stock.row_tokens,
            )
        )
    return batches
