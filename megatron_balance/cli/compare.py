"""Compare every policy on your lengths, before any training or on a run that was recorded.

Each policy plans the same global batches, and one cost model judges them all. Times are predicted from these plans:
optimiser and data loading are not in them, nor any communication but that of context-parallel ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cli.costs import Costs
from megatron_balance.cli.flags import STANDARD_OUTPUT, count, integer, output_file
from megatron_balance.cli.policies import Policy, PolicyResult, Question, measured_outside, recommend
from megatron_balance.cli.screen import in_a_line, print_table, progress, say
from megatron_balance.cost.model import MICROBATCH_TOKENS, CostModel
from megatron_balance.cost.rates import profiles
from megatron_balance.errors import BalanceError
from megatron_balance.lengths import (
    MAX_LENGTHS,
    MEGATRON_SEED,
    STOCKS,
    SYNTHETIC_LENGTHS,
    Rows,
    StockRows,
    read_rows,
    stock_rows,
    synthetic_lengths,
)
from megatron_balance.model.hf_config import PRESETS
from megatron_balance.planner import Problem, resolve_objective
from megatron_balance.record import (
    MAX_GPUS,
    MAX_STAGES,
    RunRecord,
    StepRecord,
    is_record,
    line_of,
    read_record,
    text_of,
)
from megatron_balance.record.step import dealt
from megatron_balance.topology import Limits, Topology

MAX_SAMPLES = 2**13  # planned without --steps, so that planning takes seconds
FEW_TOKENS = 10  # on average, below which the lengths are doubted
SYNTHETIC_STEPS = 10  # global batches of `synthetic:NAME` without N and --steps

_EPILOG = f"""\
lengths, in the order of training:
  FILE.npy .npz .jsonl .csv .txt .parquet  a number of tokens for each sample; text also as .gz, or - for standard
                                           input; lists of input_ids are counted, a bare list is a packed row
  FILE.idx, or its path without .idx       a Megatron data set: the tokens of each document
  synthetic:NAME[:N[:SEED]]                drawn; NAME is one of
{textwrap.fill(", ".join(SYNTHETIC_LENGTHS), 112, initial_indent=" " * 43, subsequent_indent=" " * 43)}
  RECORD                                   folder of a run with --balance-record, or a file of compare --json:
                                           its own steps, ranks, cap and costs

stock Megatron, which all are compared with (--data; files of lengths with --seq-length are padded, of lists packed):
{chr(10).join(f"  {name:<17} {words.format('N')}" for name, words in STOCKS.items())}

examples:
  megatron-balance compare chats.jsonl --seq-length 8192 --global-batch-size 256 --dp-size 8 --model Qwen/Qwen3-8B
  megatron-balance compare my_corpus --data masked-documents --seq-length 8192 --global-batch-size 256 --dp-size 8 \\
      --model Qwen3-8B --device 400
  megatron-balance compare runs/record --model Qwen3-8B

your training script's flags may follow --: what they refuse is not compared

policies (their flags are printed below the table):
  stock         Megatron's own sampler: row i on rank i % dp_size, one row a micro-batch
  packed        every rank packs the samples that it loaded, first fit
  balance-data  samples move so that every rank has as many tokens
  by-flops      samples move so that every rank has as many FLOPs, those of --model
  calibrated    samples move so that every rank takes as long, by --cost seconds.json
  dynamic-cp    the last of these, and each micro-batch has a context-parallel size of its own, where training allows it

columns, means over the steps:
  step s         predicted time, forward and backward; with --device or a seconds.json
  tokens/s/GPU   tokens of your samples, without padding, by that time and by all GPUs (dp*cp*tp*pp)
  speed          predicted time of stock over that of the policy
  imbalance      slowest over mean, of ranks that wait for one another; without the bubble of a pipeline
  over bound     predicted time above a bound that no plan can beat
  bound waits    part of that bound's time that GPUs wait: a sample costs more than a rank's share
  headroom       room below the cap in the fullest micro-batch of all steps; below 0, one sample is longer than the cap
  CP             ranks that share a token by context parallelism

FLOPs are those this package plans by: causal attention once, 3x for a GEMM and 3.5x for attention, no recomputation,
{MICROBATCH_TOKENS} tokens a micro-batch for launches. With --tp-size activations are split by sequence parallelism.

models:
{textwrap.fill(", ".join(PRESETS), 112, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)}
  or their ids on Hugging Face, or the path of a config.json, or its sizes: hidden_size=4096,num_hidden_layers=36,
  num_attention_heads=32,num_key_value_heads=8,intermediate_size=12288,vocab_size=151936
"""

_OPTIONS: dict[str, dict[str, tuple[Any, str, str]]] = {
    "lengths": {
        "--key": (str, "NAME", "array, column or field of the file that holds the lengths, or lists of tokens"),
        "--data": (str, "KIND", f"what stock trains on: {', '.join(STOCKS)}"),
        "--seq-length": (count, "N", "Megatron's: tokens of a row of stock"),
    },
    "batch": {
        "--global-batch-size": (count, "N", "samples a step, or rows"),
        "--max-tokens-per-gpu": (count, "T", "tokens a GPU may hold in a micro-batch (default: --seq-length over CP)"),
        "--steps": (count, "K", f"global batches to plan (default: all, but at most {MAX_SAMPLES} samples)"),
    },
    "ranks, as in Megatron": {
        "--dp-size": (count, "D", "data-parallel ranks"),
        "--cp-size": (count, "C", "context-parallel ranks (default: 1)"),
        "--tp-size": (count, "P", "tensor-parallel ranks (default: 1)"),
        "--pp-size": (count, "P", "pipeline stages (default: 1)"),
        "--ep-size": (count, "E", "expert-parallel ranks (default: 1)"),
    },
    "cost": {
        "--model": (str, "MODEL", "preset, Hugging Face config.json, or sizes KEY=N,…; its FLOPs are the cost"),
        "--cost": (str, "COST", "tokens, flops (default with --model), or a seconds.json of megatron-balance fit"),
        "--device": (
            str,
            "DEVICE",
            "gives seconds: TFLOPS that one GPU reaches in training by these FLOPs, LINEAR or LINEAR,ATTENTION, or "
            f"published ones of {', '.join(profiles())}",
        ),
    },
    "output": {
        "--policy": (str, "NAME", "show this policy's plan: its first step"),
        "--json": (
            output_file,
            "OUT",
            "write all figures, and the plan of --policy (default: the recommended); - prints them",
        ),
    },
}
"""Flags by group: type, metavar, help."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `compare`. One that was not given is None: a recorded run's own value stands in for it."""
    parser.epilog = _EPILOG
    parser.add_argument("lengths", metavar="LENGTHS", help="file of sample lengths, synthetic:NAME, or a record")
    groups = {title: parser.add_argument_group(title) for title in _OPTIONS}
    for title, options in _OPTIONS.items():
        for flag, (kind, metavar, words) in options.items():
            groups[title].add_argument(flag, type=kind, metavar=metavar, help=words)
    words = f"shuffle the lengths first, by this seed (0); documents always are, by this in place of {MEGATRON_SEED}"
    groups["lengths"].add_argument("--shuffle", nargs="?", type=integer(0), const=0, metavar="SEED", help=words)
    parser.set_defaults(script_flags=())


def run(args: argparse.Namespace) -> int:
    """Compare, print, and write the file asked for."""
    if args.json != STANDARD_OUTPUT:
        content = _compare(args)
        if args.json is not None:
            args.json.write_bytes(content)
        return 0
    with contextlib.redirect_stdout(sys.stderr):
        content = _compare(args)
    print(content.decode(), end="")
    return 0


def _compare(args: argparse.Namespace) -> bytes:
    """Compare and print; the result is what --json writes."""
    record = read_record(Path(args.lengths)) if is_record(Path(args.lengths)) else None
    topology, limits = _ranks_and_cap(args, record=record)
    costs = Costs(args.cost, args.model, args.device, record, limits.max_tokens_per_gpu or 0)
    if costs.shape is not None and topology.ep_size > 1 and not costs.shape.num_experts:
        raise BalanceError(f"--ep-size is {topology.ep_size}: {args.model} has no experts; drop it.")
    data = None if record is not None else _stock_rows(args)
    kind = "samples" if data is None else data.kind
    options = {"padded": {"sft": True}, "packed": {"sft": True}}.get(kind, {})
    if kind == "masked-documents":
        options = {"dataloader_inter_document_masking": True}
    question = Question(costs, topology, limits, script_flags=args.script_flags, data_options=options)
    policies, reasons = question.policies()
    if kind == "documents":
        policies = policies[:1]
        reasons = [
            "all rows cost the same, and without cu_seqlens none is split: balancing needs --data masked-documents"
        ]
    names = [policy.name for policy in policies]
    if args.policy not in (None, *names):
        raise BalanceError(
            f"--policy is {args.policy!r}: it must be one of {', '.join(names)}. --model adds policies by FLOPs, "
            "--cost seconds.json the calibrated one."
        )
    batches = _batches(args, record=record, data=data, topology=topology, limits=limits)
    row_tokens = batches[0].row_tokens
    if record is not None:
        words = "as they are" if batches[0].rows is None or not row_tokens else f"filled up to {row_tokens} tokens"
        say(f"Stock: the recorded rows, {words}, one a micro-batch.", style="bold")
    else:
        say(f"Stock: {STOCKS[kind].format(args.seq_length)}.", style="bold")
    lengths = np.concatenate([batch.segments for batch in batches])
    say(
        f"{sum(batch.lengths.size for batch in batches)} samples in {len(batches)} steps. Lengths: mean "
        f"{lengths.mean():.0f}, median {np.median(lengths):.0f}, longest {lengths.max()} tokens. Cost: "
        f"{costs.text(topology)}."
    )
    if data is not None and data.stock.num_cut:
        reasons.append(
            f"{data.stock.num_cut} rows are longer than --seq-length {args.seq_length} and cut, as by Megatron."
        )
    if kind != "documents" and (lengths.mean() < FEW_TOKENS or (lengths.size > 1 and lengths.min() == lengths.max())):
        reasons.append(
            f"the lengths are {lengths.min()} to {lengths.max()} tokens: if that surprises you, see what was counted "
            "(a tokenizer may return fields, whose number is not that of tokens)."
        )
    if costs.calibration is not None and (notice := costs.calibration.extrapolation(int(lengths.max()))):
        reasons.append(notice)
    for reason in reasons:
        say(f"Note: {reason}", style="yellow")
    results: list[PolicyResult] = []
    with progress("planning global batches", total=len(policies) * len(batches)) as show:
        for policy in policies:
            steps: list[StepRecord] = []
            for step in question.plan(policy, batches):
                steps.append(step)
                show(len(results) * len(batches) + len(steps))
            results.append(question.judge(policy, steps, row_tokens=row_tokens))
    stock = results[0]
    outside = None if record is None else measured_outside(record)
    advised, sentences = recommend(results, question=question, outside=outside)
    bounds = [metrics.lower_bound for metrics in results[1].metrics] if len(results) > 1 else None
    shown = [result.line(stock=stock, bounds=bounds if result is stock else None) for result in results]
    if record is not None and topology == record.info.topology.at_cp_size(record.info.topology.cp_size):
        as_it_ran = Policy("as it ran", in_a_line(record.info.policy), record.info.cost_model)
        ran = [step for step in record.steps if step.lengths.size][: len(batches)]
        shown.insert(1, question.judge(as_it_ran, ran).line(stock=stock))
    timed = stock.scale.unit == "s"
    _print_policies(shown, timed=timed, advised=advised.policy.name)
    say(f"Recommendation, predicted by {'seconds' if timed else costs.name}: {advised.policy.name}", style="bold")
    for sentence in sentences:
        say(f"  {sentence}")
    if costs.rates is not None and advised is not stock:
        gains = [_gain(question, advised, stock=stock, factor=factor) for factor in (0.5, 2.0)]
        say("  If attention ran at half or twice that rate, these plans would gain {:.2f}x or {:.2f}x.".format(*gains))
    chosen = advised if args.policy is None else results[names.index(args.policy)]
    if args.policy is not None:
        _print_plan(chosen)
    if args.json is not None:
        say(f"All figures, and the plan of {chosen.policy.name}, are in {args.json}.")
    command = "" if advised is stock else question.command(advised.policy)
    advice = {"kind": "advice", "policy": advised.policy.name, "flags": advised.policy.flags, "command": command}
    advice |= {"speedup": advised.speedup(stock), "fits": advised.least_headroom >= 0, "sentences": sentences}
    return b"".join(map(text_of, (chosen.setting.line(), *map(line_of, chosen.steps), *shown, advice)))


def _gain(question: Question, planned: PolicyResult, *, stock: PolicyResult, factor: float) -> float:
    """Speed-up over stock of plans as they are, where attention runs at a multiple of the device's rate."""
    question = replace(question, costs=replace(question.costs, attention_factor=factor))
    before, after = (question.judge(each.policy, each.steps) for each in (stock, planned))
    return after.speedup(before)


def _ranks_and_cap(args: argparse.Namespace, *, record: RunRecord | None) -> tuple[Topology, Limits]:
    """Those of the flags, else of the record; a flag that has no place here, or is missing, is told before any work."""
    wrong = (
        ["global_batch_size", "dp_size"]
        if record is None
        else ["global_batch_size", "key", "shuffle", "data", "seq_length"]
    )
    wrong = [name for name in wrong if (getattr(args, name) is None) == (record is None)]
    if record is None and args.max_tokens_per_gpu is None and args.seq_length is None:
        wrong.append("max_tokens_per_gpu")
    if wrong:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
        needs = f"compare needs {'it' if len(wrong) == 1 else 'them'}, unless LENGTHS is a record"
        remedy = needs if record is None else "a record has its own, drop it"
        raise BalanceError(f"{flags} {'missing' if record is None else 'given'}: {remedy}.")
    names = ("dp_size", "cp_size", "tp_size", "pp_size", "ep_size")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.tp_size is not None:  # Megatron's default: experts are split as all else is
        given |= {"etp_size": args.tp_size, "sequence_parallel": args.tp_size > 1}
    recorded = Topology(1) if record is None else record.info.topology
    topology = replace(recorded.at_cp_size(recorded.cp_size), **given)
    if topology.num_gpus > MAX_GPUS or topology.pp_size > MAX_STAGES:
        raise BalanceError(
            f"--dp-size, --cp-size, --tp-size and --pp-size make {topology.num_gpus} GPUs: at most {MAX_GPUS} in "
            f"{MAX_STAGES} stages are compared."
        )
    if record is None and args.global_batch_size % topology.dp_size:
        raise BalanceError(
            f"--global-batch-size is {args.global_batch_size}: Megatron refuses one that is no multiple of --dp-size "
            f"{topology.dp_size} times --micro-batch-size."
        )
    num_ranks, group = topology.num_leaves * topology.tp_size, topology.etp_size * topology.ep_size
    if num_ranks % group:
        raise BalanceError(
            f"--ep-size is {topology.ep_size}: experts take groups of {group} ranks (--ep-size times --tp-size), which "
            f"do not divide the {num_ranks} ranks of a pipeline stage."
        )
    cap = args.max_tokens_per_gpu or (record and record.info.limits.max_tokens_per_gpu)
    if cap is None and args.seq_length is not None:
        cap = -(-args.seq_length // topology.cp_size)  # a row of stock is known to fit
    if cap is None:
        raise BalanceError("the recorded run had no token cap: give --max-tokens-per-gpu.")
    return topology, Limits(cap)


class _Data(NamedTuple):
    """Rows of stock, of a kind of STOCKS, and the name of what they were read from."""

    kind: str
    stock: StockRows


def _stock_rows(args: argparse.Namespace) -> _Data:
    """The rows of stock that are planned, as far as the file goes."""
    if args.data not in (None, *STOCKS):
        raise BalanceError(f"--data is {args.data!r}: it must be one of {', '.join(STOCKS)}.")
    size, documents = args.global_batch_size, args.data in ("documents", "masked-documents")
    most = (args.steps or max(MAX_SAMPLES // size, 1)) * size
    rows, of_index = _rows(args, most=None if documents or args.shuffle is not None else most + 1)
    kind = args.data
    if kind is None and args.seq_length is not None and not of_index:
        kind = "padded" if rows.counts is None else "packed"
    if kind is None:
        choice = "documents or masked-documents" if of_index else "samples, or --seq-length N for the rows of --sft"
        raise BalanceError(
            f"{in_a_line(args.lengths)} does not say what stock trains on: give --data {choice} (compare --help)."
        )
    if (kind == "samples") != (args.seq_length is None):
        remedy = "leave out --seq-length" if kind == "samples" else "give Megatron's --seq-length, the tokens of a row"
        raise BalanceError(f"--data is {kind}: {remedy}.")
    if args.seq_length is None:
        return _Data(kind, StockRows(rows))
    seed = MEGATRON_SEED if args.shuffle is None else args.shuffle
    multiple = 1 if args.cp_size in (None, 1) else 2 * args.cp_size
    sizes = {"seq_length": args.seq_length, "most": most + 1, "multiple": multiple}
    return _Data(kind, stock_rows(rows, kind=kind, seed=seed, **sizes))


def _rows(args: argparse.Namespace, *, most: int | None) -> tuple[Rows, bool]:
    """Rows of LENGTHS in the order of training, at most so many; and whether they are a Megatron data set's."""
    kind, *names = args.lengths.split(":")
    of_index = False
    if kind != "synthetic" or not names:
        with progress(f"reading {in_a_line(args.lengths, most=40)}") as show:
            of_index = not args.lengths.endswith((".npy", ".npz")) and _is_index(args.lengths)
            rows = read_rows(args.lengths, key=args.key, most=None if of_index else most, progress=show)
    elif args.key is not None:
        raise BalanceError(f"--key is {args.key!r} and LENGTHS is {args.lengths!r}, which has no columns: drop --key.")
    elif len(names) > 3 or not all(number.isdecimal() and len(number) < 20 for number in names[1:]):
        raise BalanceError(f"LENGTHS is {args.lengths!r}: it must be synthetic:NAME, :NAME:N or :NAME:N:SEED.")
    else:
        drawn = (args.steps or SYNTHETIC_STEPS) * args.global_batch_size
        num_samples, seed = map(int, [*names[1:], *(drawn, 0)[len(names) - 1 :]])
        if num_samples > MAX_LENGTHS:
            raise BalanceError(f"LENGTHS is {args.lengths!r}: at most {MAX_LENGTHS} samples are drawn.")
        num_samples = num_samples if most is None else min(num_samples, most)
        rows = Rows(synthetic_lengths(names[0], num_samples=num_samples, seed=seed))
    if args.shuffle is not None and not of_index and args.data not in ("documents", "masked-documents"):
        order = np.random.default_rng(args.shuffle).permutation(
            rows.counts.size if rows.counts is not None else rows.lengths.size
        )
        if rows.counts is None:
            rows = Rows(rows.lengths[order])
        else:
            parts = np.split(rows.lengths, np.cumsum(rows.counts)[:-1])
            rows = Rows(np.concatenate([parts[row] for row in order.tolist()]), rows.counts[order])
    return rows, of_index


def _is_index(path: str) -> bool:
    return path.lower().endswith(".idx") or (not Path(path).suffix and Path(f"{path}.idx").is_file())


def _batches(
    args: argparse.Namespace, *, record: RunRecord | None, data: _Data | None, topology: Topology, limits: Limits
) -> Sequence[StepRecord]:
    """The global batches to plan, in the order of training, without an incomplete last one, as in Megatron."""
    dp_size, steps = topology.dp_size, args.steps
    if data is not None:
        return _batches_of_rows(args, stock=data.stock, topology=topology, limits=limits)
    assert record is not None
    batches = [step for step in record.steps if step.lengths.size]
    if record.info.topology.dp_size != dp_size:
        batches = [replace(batch, home_ranks=_homes(batch, dp_size=dp_size)) for batch in batches]
    if len(batches) < (steps or 1):
        raise BalanceError(f"the record has {len(batches)} steps with samples; --steps is {steps or 1}.")
    if steps is None:
        samples = np.cumsum([batch.lengths.size for batch in batches])
        steps = max(int((samples <= MAX_SAMPLES).sum()), 1)
        if steps < len(batches):
            say(f"Planning the first {steps} of {len(batches)} steps (--steps {len(batches)} for all).")
    return batches[:steps]


def _homes(batch: StepRecord, *, dp_size: int) -> NDArray[np.int64]:
    """The rank that loads each sample: that of its row."""
    rows = np.arange(batch.lengths.size) if batch.rows is None else batch.rows
    return dealt(int(rows.max()) + 1, dp_size=dp_size)[rows]


def _batches_of_rows(
    args: argparse.Namespace, *, stock: StockRows, topology: Topology, limits: Limits
) -> Sequence[StepRecord]:
    """Whole global batches of rows, and a line where the file holds more than are planned."""
    size, lengths = args.global_batch_size, stock.rows.lengths
    counts = np.ones(lengths.size, np.int64) if stock.rows.counts is None else stock.rows.counts
    num_rows, steps = counts.size, args.steps or max(MAX_SAMPLES // args.global_batch_size, 1)
    if args.steps is None:
        if num_rows > steps * size:
            say(f"Planning the first {steps} steps (--steps for more).")
        steps = min(steps, max(num_rows // size, 1))
    if num_rows < steps * size:
        what = f"{steps} steps of --global-batch-size {size} need {steps * size} rows"
        raise BalanceError(f"{what}, but there are {num_rows}: lower {'it' if args.steps is None else 'one of them'}.")
    objective, ends = resolve_objective("auto", topology=topology), np.concatenate([[0], np.cumsum(counts)])
    batches: list[StepRecord] = []
    for step in range(steps):
        of_rows = counts[step * size : (step + 1) * size]
        rows = np.repeat(np.arange(size), of_rows)
        problem = Problem.of(
            lengths[ends[step * size] : ends[(step + 1) * size]],
            home_ranks=dealt(size, dp_size=topology.dp_size)[rows],
            cost_model=CostModel.tokens(),
            topology=topology,
            limits=limits,
            objective=objective,
        )
        batches.append(StepRecord.as_loaded(problem, iteration=step + 1, rows=rows, row_tokens=stock.row_tokens))
    return batches


_COLUMNS = {
    "policy": "{name}",
    "step s": "{seconds_per_step:.4g}",
    "tokens/s/GPU": "{tokens_per_second_per_gpu:.0f}",
    "speed": "{speedup:.2f}x",
    "imbalance": "{imbalance:.3f}",
    "over bound": "+{over_bound:.1%}",
    "bound waits": "{unavoidable_waiting:.1%}",
    "padding": "{padding:.1%}",
    "headroom": "{cap_headroom:.1%}",
    "CP": "{mean_cp_size:.1f}",
    "micro-batches": "{num_microbatches:.1f}",
    "plan ms": "{plan_ms:.1f}",
}


def _print_policies(shown: Sequence[dict[str, Any]], *, timed: bool, advised: str) -> None:
    """Print one row per policy, stock first, and the flags of each."""
    columns = {name: text for name, text in _COLUMNS.items() if timed or name not in ("step s", "tokens/s/GPU")}
    rows = [[text.format(**one) for text in columns.values()] for one in shown]
    print_table(list(columns), rows, strong=advised)
    width = max(len(one["name"]) for one in shown)
    if len(shown) > 1:
        say("\n  ".join(["Flags:", *(f"{one['name']:<{width}}  {one['flags']}" for one in shown[1:])]))


def _print_plan(result: PolicyResult) -> None:
    """Print the ranks of the first step: how many micro-batches of each context-parallel size, and what is in them."""
    step = result.steps[0]
    costs = step.costs.sum(axis=1)
    rows: list[list[object]] = []
    for rank, slots in enumerate(step.samples()):
        held = step.lengths[[sample for slot in slots for sample in slot]]
        sizes = Counter(size for size, slot in zip(step.cp_size_grid[rank].tolist(), slots, strict=True) if slot)
        of_sizes = " ".join(f"{count}x{size}" for size, count in sorted(sizes.items()))
        over_mean = f"{costs[rank] / max(costs.mean(), 1e-300):.3f}"
        rows.append([rank, of_sizes, held.size, held.sum(), held.max(initial=0), over_mean])
    say(f"Step 1 under {result.policy.name}:")
    print_table(["rank", "micro-batches x CP", "samples", "tokens", "longest", "cost over mean"], rows)
