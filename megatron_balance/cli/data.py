"""Reads what `compare` plans: ranks, token cap, and global batches, of a file of lengths or of a record.

The kind of stock follows from the file and `--seq-length`. Where neither says it, it is asked for.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cli.terminal import in_a_line
from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.lengths import (
    MEGATRON_SEED,
    STOCKS,
    Rows,
    file_of,
    filled_rows,
    joined_rows,
    read_rows,
    read_tokens,
    synthetic_lengths,
)
from megatron_balance.planner import Forest, Problem
from megatron_balance.record import RunRecord, StepRecord
from megatron_balance.record.step import round_robin
from megatron_balance.samples.shared_prefixes import chains_of_rows, next_tokens
from megatron_balance.topology import Limits, Topology

MAX_SAMPLES = 2**13  # planned without --steps, so that planning takes seconds
SYNTHETIC_STEPS = 10  # global batches of `synthetic:NAME` without N and --steps
BLOCK = 16  # tokens in which lists are compared
DOCUMENTS = ("documents", "masked-documents")
_SIZES = ("dp_size", "cp_size", "tp_size", "pp_size", "ep_size")


@dataclass(frozen=True)
class Batches:
    """Global batches as loaded, not planned.

    `kind` is that of `--data`, and `samples` for a record; `stock` says how a stock run computes them.
    """

    steps: Sequence[StepRecord]
    kind: str
    stock: str


def ranks_and_cap(args: argparse.Namespace, *, record: RunRecord | None) -> tuple[Topology, Limits]:
    """Ranks of the flags or of the record, and the cap; a flag that is missing, or has no effect, is refused."""
    cap = args.max_tokens_per_gpu
    if record is not None:
        names = ("global_batch_size", "key", "shuffle", "data", "seq_length", "share_prefixes", *_SIZES)
        if flags := [_flag(name) for name in names if getattr(args, name) is not None]:
            raise BalanceError(f"{', '.join(flags)} given: a record has its own, drop it.")
        if (cap := cap or record.info.limits.max_tokens_per_gpu) is None:
            raise BalanceError("the recorded run had no token cap: give --max-tokens-per-gpu.")
        return record.info.topology.with_cp_size(record.info.topology.cp_size), Limits(cap)
    if cap is None and args.seq_length is not None:
        cap = -(-args.seq_length // (args.cp_size or 1))  # a row of stock is known to fit
    values = {"global_batch_size": args.global_batch_size, "dp_size": args.dp_size, "max_tokens_per_gpu": cap}
    missing = [_flag(name) for name, value in values.items() if value is None]
    if missing:
        raise BalanceError(f"{', '.join(missing)} missing: compare needs them, but for a record.")
    sizes = {name: size for name in _SIZES if (size := getattr(args, name)) is not None}
    tp_size = sizes.get("tp_size", 1)
    # Megatron's default: experts are split as all else is.
    topology = Topology(**sizes, etp_size=tp_size, sequence_parallel=tp_size > 1)
    if args.global_batch_size % topology.dp_size:
        raise BalanceError(
            f"--global-batch-size {args.global_batch_size} is not a multiple of --dp-size {topology.dp_size}: change "
            "one of them."
        )
    num_ranks, group = topology.dp_cp_size * tp_size, tp_size * topology.ep_size
    if num_ranks % group:
        raise BalanceError(
            f"--ep-size is {topology.ep_size}: experts take groups of {group} ranks, which do not divide {num_ranks}: "
            "lower it, or change --dp-size."
        )
    return topology, Limits(cap)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def read_batches(args: argparse.Namespace, *, record: RunRecord | None, topology: Topology, limits: Limits) -> Batches:
    """The global batches that are compared."""
    if record is not None:
        recorded = [step for step in record.steps if step.lengths.size]
        if len(recorded) < (args.steps or 1):
            raise BalanceError(f"the record has {len(recorded)} steps with samples; --steps is {args.steps or 1}.")
        samples = np.cumsum([step.lengths.size for step in recorded])
        steps = recorded[: args.steps or max(int((samples <= MAX_SAMPLES).sum()), 1)]
        row_tokens = steps[0].row_tokens if steps[0].rows is not None else None
        stock = f"the recorded rows, {'as they are' if row_tokens is None else f'filled up to {row_tokens} tokens'}"
        return Batches(steps, "samples", stock)
    size = args.global_batch_size
    most_steps = args.steps or max(MAX_SAMPLES // size, 1)
    kind, rows, texts = _rows_of_stock(args, limit=most_steps * size)
    num_steps = args.steps or min(most_steps, max(rows.counts.size // size, 1))
    if rows.counts.size < num_steps * size:
        raise BalanceError(
            f"{num_steps} steps of --global-batch-size {size} need {num_steps * size} rows, but there are "
            f"{rows.counts.size}: lower it, or --steps."
        )
    ends = np.concatenate([[0], np.cumsum(rows.counts)])
    steps: list[StepRecord] = []
    for first in range(0, num_steps * size, size):
        row_of = np.repeat(np.arange(size), rows.counts[first : first + size])
        problem = Problem.of(
            rows.lengths[ends[first] : ends[first + size]],
            home_ranks=round_robin(size, dp_size=topology.dp_size)[row_of],
            cost_model=CostModel.tokens(),
            topology=topology,
            limits=limits,
            forest=_forest_of(texts[first : first + size]) if texts else None,
        )
        steps.append(
            StepRecord(
                **vars(problem),
                microbatch_of=np.zeros_like(row_of),
                cp_size_grid=np.full((topology.dp_size, 1), topology.cp_size),
                iteration=1,
                rows=row_of,
                row_tokens=rows.row_tokens,
            )
        )
    stock = STOCKS[kind].format(args.seq_length)
    if rows.num_cut:
        stock += f"; {rows.num_cut} are longer and cut"
    return Batches(steps, kind, stock)


def _rows_of_stock(args: argparse.Namespace, *, limit: int) -> tuple[str, Rows, list[NDArray[np.int64]]]:
    """The kind of stock, its rows, at most `limit`, and their tokens if it is asked what they share."""
    kind, is_index = args.data, file_of(args.lengths).suffix.lower() == ".idx"
    if kind is None and (is_index or args.seq_length is None):
        choice = " or ".join(DOCUMENTS) if is_index else "samples, or --seq-length N for the rows of --sft"
        raise BalanceError(
            f"{in_a_line(args.lengths)} does not say what stock trains on: give --data {choice} (compare --help)."
        )
    if kind is not None and (kind == "samples") != (args.seq_length is None):
        remedy = "leave out --seq-length" if kind == "samples" else "give Megatron's --seq-length, the tokens of a row"
        raise BalanceError(f"--data is {kind}: {remedy}.")
    texts: list[NDArray[np.int64]] = []
    num_rows = limit if args.shuffle is None and kind not in DOCUMENTS else None
    if not args.share_prefixes:
        rows = _read(args, limit=num_rows)
    elif kind == "samples":
        texts = read_tokens(args.lengths, key=args.key, limit=num_rows)
        rows = Rows.from_samples(np.array([text.size for text in texts]))
    else:
        raise BalanceError(f"--share-prefixes needs --data samples, not {kind or 'rows'}, which are filled or cut.")
    if args.shuffle is not None and kind not in DOCUMENTS:
        order = np.random.default_rng(args.shuffle).permutation(rows.counts.size)
        rows = rows.permuted(order)
        texts = [texts[row] for row in order.tolist()] if texts else []
    if kind is None:
        kind = "packed" if (rows.counts != 1).any() else "padded"
    if args.seq_length is None:
        return kind, rows, texts
    if kind in DOCUMENTS:
        seed, is_masked = MEGATRON_SEED if args.shuffle is None else args.shuffle, kind == "masked-documents"
        rows = joined_rows(rows.lengths, seq_length=args.seq_length, seed=seed, limit=limit, is_masked=is_masked)
    else:
        multiple = 1 if args.cp_size in (None, 1) else 2 * args.cp_size
        rows = filled_rows(rows, seq_length=args.seq_length, multiple=multiple)
    return kind, rows, texts


def _read(args: argparse.Namespace, *, limit: int | None) -> Rows:
    """Rows of LENGTHS in its order, at most `limit`."""
    source, *names = args.lengths.split(":")
    if source != "synthetic" or not names:
        return read_rows(args.lengths, key=args.key, limit=limit)
    if args.key is not None:
        raise BalanceError(f"--key is {args.key!r} and LENGTHS is {args.lengths!r}, which has no columns: drop --key.")
    number = names[1] if len(names) == 2 else str((args.steps or SYNTHETIC_STEPS) * args.global_batch_size)
    if len(names) > 2 or not number.isdecimal():
        raise BalanceError(f"LENGTHS is {args.lengths!r}: it must be synthetic:NAME or synthetic:NAME:N.")
    return Rows.from_samples(synthetic_lengths(names[0], num_samples=min(int(number), limit or int(number))))


def _forest_of(texts: Sequence[NDArray[np.int64]]) -> Forest:
    """What lists of tokens share, labels being the next tokens."""
    lengths, tokens = np.array([text.size for text in texts]), np.concatenate(texts)
    rows = np.column_stack([tokens, next_tokens(tokens, lengths=lengths)])
    untrained = np.zeros(tokens.size, dtype=np.bool_)
    return Forest.from_chains(lengths, chains_of_rows(rows, lengths=lengths, trained=untrained, block=BLOCK))
