"""Reads what `compare` plans: ranks, token cap, and global batches, of a file of lengths or of a record.

The kind of stock follows from the file and `--seq-length`. Where neither says it, it is asked for.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cli.terminal import in_a_line
from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.lengths import MEGATRON_SEED, STOCKS, Rows, read_rows, read_tokens, stock_rows, synthetic_lengths
from megatron_balance.planner import Forest, Problem
from megatron_balance.record import MAX_GPUS, MAX_STAGES, RunRecord, StepRecord
from megatron_balance.record.step import round_robin
from megatron_balance.samples.shared_prefixes import chains_of_rows, next_tokens
from megatron_balance.topology import Limits, Topology

MAX_SAMPLES = 2**13  # planned without --steps, so that planning takes seconds
SYNTHETIC_STEPS = 10  # global batches of `synthetic:NAME` without N and --steps
BLOCK = 16  # tokens in which lists are compared
FEW_TOKENS = 10  # on average, below which the lengths are doubted
DOCUMENTS = ("documents", "masked-documents")
_SIZES = ("dp_size", "cp_size", "tp_size", "pp_size", "ep_size")


@dataclass(frozen=True)
class Batches:
    """Global batches as loaded, not planned: all that there are, or the first.

    `kind` is that of `--data`, and `samples` for a record; `stock` says how a stock run computes them, `notes` what a
    user may miss.
    """

    steps: Sequence[StepRecord]
    kind: str
    stock: str
    notes: list[str]
    is_all: bool


def ranks_and_cap(args: argparse.Namespace, *, record: RunRecord | None) -> tuple[Topology, Limits]:
    """Ranks of the flags or of the record, and the cap; a flag that is missing, or has no effect, is refused."""
    names = (
        ("dp_size",)
        if record is None
        else ("key", "shuffle", "data", "seq_length", "save_lengths", "share_prefixes", *_SIZES)
    )
    wrong = [name for name in ("global_batch_size", *names) if (getattr(args, name) is None) == (record is None)]
    if record is None and args.max_tokens_per_gpu is None and args.seq_length is None:
        wrong.append("max_tokens_per_gpu")
    if wrong:
        remedy = "given: a record has its own, drop it" if record else "missing: compare needs them, but for a record"
        raise BalanceError(f"{', '.join('--' + name.replace('_', '-') for name in wrong)} {remedy}.")
    if record is not None:
        if (cap := args.max_tokens_per_gpu or record.info.limits.max_tokens_per_gpu) is None:
            raise BalanceError("the recorded run had no token cap: give --max-tokens-per-gpu.")
        return record.info.topology.with_cp_size(record.info.topology.cp_size), Limits(cap)
    sizes = {name: size for name in _SIZES if (size := getattr(args, name)) is not None}
    if args.tp_size is not None:  # Megatron's default: experts are split as all else is
        sizes |= {"etp_size": args.tp_size, "sequence_parallel": args.tp_size > 1}
    topology = Topology(**sizes)
    if topology.num_gpus > MAX_GPUS or topology.pp_size > MAX_STAGES:
        raise BalanceError(
            f"--dp-size, --cp-size, --tp-size and --pp-size make {topology.num_gpus} GPUs: at most {MAX_GPUS} in "
            f"{MAX_STAGES} stages are compared."
        )
    if args.global_batch_size % topology.dp_size:
        multiple = -(-args.global_batch_size // topology.dp_size) * topology.dp_size
        raise BalanceError(
            f"--global-batch-size {args.global_batch_size} is not a multiple of --dp-size {topology.dp_size}: give "
            f"{multiple}, or change --dp-size."
        )
    num_ranks, group = topology.dp_cp_size * topology.tp_size, topology.etp_size * topology.ep_size
    if num_ranks % group:
        raise BalanceError(
            f"--ep-size is {topology.ep_size}: experts take groups of {group} ranks, which do not divide {num_ranks}: "
            "lower it, or change --dp-size."
        )
    cap = args.max_tokens_per_gpu
    if cap is None and args.seq_length is not None:
        cap = -(-args.seq_length // topology.cp_size)  # a row of stock is known to fit
    return topology, Limits(cap)


def read_batches(args: argparse.Namespace, *, record: RunRecord | None, topology: Topology, limits: Limits) -> Batches:
    """The global batches that are compared."""
    if record is None:
        batches = _from_lengths(args, topology=topology, limits=limits)
    else:
        batches = recorded_batches(record, steps=args.steps, dp_size=topology.dp_size)
    if args.steps is None and not batches.is_all:
        batches.notes.append(f"these are the first {len(batches.steps)} steps; --steps plans more.")
    lengths = np.concatenate([step.segments for step in batches.steps])
    if batches.kind != "documents" and (lengths.mean() < FEW_TOKENS or (lengths.size > 1 and np.ptp(lengths) == 0)):
        batches.notes.append(
            f"the lengths are {lengths.min()} to {lengths.max()} tokens: if that surprises you, see what was counted."
        )
    return batches


def recorded_batches(record: RunRecord, *, steps: int | None, dp_size: int) -> Batches:
    """The global batches of a record, each sample on the rank that loaded it, or dealt anew to another `dp_size`."""
    recorded = [step for step in record.steps if step.lengths.size]
    if len(recorded) < (steps or 1):
        raise BalanceError(f"the record has {len(recorded)} steps with samples; --steps is {steps or 1}.")
    samples = np.cumsum([step.lengths.size for step in recorded])
    batches = recorded[: steps or max(int((samples <= MAX_SAMPLES).sum()), 1)]
    if record.info.topology.dp_size != dp_size:
        rows = [np.arange(batch.lengths.size) if batch.rows is None else batch.rows for batch in batches]
        homes = [round_robin(int(batch_rows.max()) + 1, dp_size=dp_size)[batch_rows] for batch_rows in rows]
        batches = [replace(batch, home_ranks=home) for batch, home in zip(batches, homes, strict=True)]
    row_tokens = batches[0].row_tokens if batches[0].rows is not None else None
    stock = f"the recorded rows, {'as they are' if row_tokens is None else f'filled up to {row_tokens} tokens'}"
    return Batches(batches, "samples", stock, [], is_all=len(batches) == len(recorded))


def _from_lengths(args: argparse.Namespace, *, topology: Topology, limits: Limits) -> Batches:
    size, steps = args.global_batch_size, args.steps
    kind, rows = rows_to_plan(args)
    first_steps = max(MAX_SAMPLES // size, 1)
    num_steps = steps or min(first_steps, max(rows.counts.size // size, 1))
    if rows.counts.size < num_steps * size:
        raise BalanceError(
            f"{num_steps} steps of --global-batch-size {size} need {num_steps * size} rows, but there are "
            f"{rows.counts.size}: lower it, or --steps."
        )
    ends = np.concatenate([[0], np.cumsum(rows.counts)])
    forests = _forests(args, kind=kind, num_rows=rows.counts.size, num_steps=num_steps)
    batches: list[StepRecord] = []
    for first, forest in zip(range(0, num_steps * size, size), forests, strict=True):
        row_of = np.repeat(np.arange(size), rows.counts[first : first + size])
        problem = Problem.of(
            rows.lengths[ends[first] : ends[first + size]],
            home_ranks=round_robin(size, dp_size=topology.dp_size)[row_of],
            cost_model=CostModel.tokens(),
            topology=topology,
            limits=limits,
            forest=forest,
        )
        batches.append(
            StepRecord(
                **vars(problem),
                microbatch_of=np.zeros_like(row_of),
                cp_size_grid=np.full((topology.dp_size, 1), topology.cp_size),
                iteration=1,
                rows=row_of,
                row_tokens=rows.row_tokens,
            )
        )
    notes: list[str] = []
    if rows.num_cut:
        notes.append(f"{rows.num_cut} rows are longer than --seq-length {args.seq_length}: Megatron cuts them.")
    is_all = rows.counts.size <= first_steps * size
    return Batches(batches, kind, STOCKS[kind].format(args.seq_length), notes, is_all=is_all)


def _forests(args: argparse.Namespace, *, kind: str, num_rows: int, num_steps: int) -> Sequence[Forest | None]:
    """What the samples of each step share, by `--share-prefixes`."""
    columns, size = args.share_prefixes, args.global_batch_size
    if columns is None:
        return [None] * num_steps
    if kind != "samples":
        raise BalanceError(f"--share-prefixes needs --data samples; it is {kind}, whose rows are filled or cut.")
    order = np.arange(num_steps * size)
    if args.shuffle is not None:
        order = np.random.default_rng(args.shuffle).permutation(num_rows)[: num_steps * size]
    limit = int(order.max()) + 1
    steps = np.split(order, num_steps)
    if columns == "tokens":
        texts = read_tokens(args.lengths, key=args.key, limit=limit)
        return [_forest_of_texts([texts[row] for row in step]) for step in steps]
    names = columns.split(",")
    if len(names) != 2:
        raise BalanceError(f"--share-prefixes is {columns!r}: give tokens, or the columns PROMPT_TOKENS,GROUP.")
    lengths, prompts, groups = (read_rows(args.lengths, key=key, limit=limit).lengths for key in (args.key, *names))
    return [Forest.from_prompts(lengths[step], prompt_tokens=prompts[step], groups=groups[step]) for step in steps]


def _forest_of_texts(texts: Sequence[NDArray[np.int64]]) -> Forest:
    """What lists of tokens share, labels being the next tokens."""
    lengths, tokens = np.array([text.size for text in texts]), np.concatenate(texts)
    rows = np.column_stack([tokens, next_tokens(tokens, lengths=lengths)])
    untrained = np.zeros(tokens.size, dtype=np.bool_)
    return Forest.from_chains(lengths, chains_of_rows(rows, lengths=lengths, trained=untrained, block=BLOCK))


def rows_to_plan(args: argparse.Namespace) -> tuple[str, Rows]:
    """The kind of stock, and its rows as far as they are planned, and one more."""
    if args.data not in (None, *STOCKS):
        raise BalanceError(f"--data is {args.data!r}: it must be one of {', '.join(STOCKS)}.")
    kind, size = args.data, args.global_batch_size
    limit = (args.steps or max(MAX_SAMPLES // size, 1)) * size + 1
    is_index = args.lengths.lower().endswith(".idx") or (
        not Path(args.lengths).suffix and Path(f"{args.lengths}.idx").is_file()
    )
    in_order = args.shuffle is None and not is_index and kind not in DOCUMENTS and args.save_lengths is None
    rows = _rows(args, limit=limit if in_order else None)
    if args.save_lengths is not None:
        packs = np.split(rows.lengths, rows.counts.cumsum()[:-1])
        args.save_lengths.write_text("".join(f"{pack.tolist()}\n" for pack in packs), encoding="utf-8")
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
    """Rows of LENGTHS in its order, at most `limit`."""
    kind, *names = args.lengths.split(":")
    if kind != "synthetic" or not names:
        return read_rows(args.lengths, key=args.key, limit=limit)
    if args.key is not None:
        raise BalanceError(f"--key is {args.key!r} and LENGTHS is {args.lengths!r}, which has no columns: drop --key.")
    if len(names) > 3 or not all(number.isdecimal() and len(number) < 20 for number in names[1:]):
        raise BalanceError(f"LENGTHS is {args.lengths!r}: it must be synthetic:NAME, :NAME:N or :NAME:N:SEED.")
    default = (args.steps or SYNTHETIC_STEPS) * args.global_batch_size
    num_samples, seed = map(int, [*names[1:], *(default, 0)[len(names) - 1 :]])
    return Rows.from_samples(synthetic_lengths(names[0], num_samples=min(num_samples, limit or num_samples), seed=seed))
