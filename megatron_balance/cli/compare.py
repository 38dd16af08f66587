"""Compare every policy on your lengths, before any training or on a run that was recorded.

Each policy plans the same global batches, and one cost model judges them all. Times are predicted from these plans:
optimiser and data loading are not in them, nor any communication but that of context-parallel ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_balance.cli.costs import Costs
from megatron_balance.cli.data import MAX_SAMPLES, batches_of_rows, rows_to_plan
from megatron_balance.cli.flags import STANDARD_OUTPUT, count, integer, output_file
from megatron_balance.cli.policies import Policy, PolicyResult, Question, recommend
from megatron_balance.cli.screen import in_a_line, print_table, progress, say
from megatron_balance.cost.model import MICROBATCH_TOKENS
from megatron_balance.cost.rates import profiles
from megatron_balance.errors import BalanceError
from megatron_balance.lengths import MEGATRON_SEED, STOCKS, SYNTHETIC_LENGTHS
from megatron_balance.model.hf_config import PRESETS
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
from megatron_balance.record.step import round_robin
from megatron_balance.topology import Limits, Topology

FEW_TOKENS = 10  # on average, below which the lengths are doubted

_EPILOG = f"""\
lengths, in the order of training:
  FILE.npy .npz .jsonl .txt .parquet       a number of tokens for each sample; text also as .gz, or - for standard
                                           input; lists of input_ids are counted, a bare list is a packed row
  FILE.idx, or its path without .idx       a Megatron data set: the tokens of each document
  synthetic:NAME[:N[:SEED]]                drawn; NAME is one of
{textwrap.fill(", ".join(SYNTHETIC_LENGTHS), 112, initial_indent=" " * 43, subsequent_indent=" " * 43)}
  RECORD                                   folder of a run with --balance-record, or a file of compare --json:
                                           its own steps, ranks, cap and costs

stock Megatron, which all are compared with (--data; files of lengths with --seq-length are padded, of lists packed):
{chr(10).join(f"  {name:<17} {words.format('N')}" for name, words in STOCKS.items())}

your training script's flags may follow --: what they refuse is not compared

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
        "--device": (str, "DEVICE", f"TFLOPS of a GPU in training: LINEAR[,ATTENTION], or {', '.join(profiles())}"),
    },
    "output": {
        "--policy": (str, "NAME", "its plan, in place of the recommended one, goes to --json"),
        "--json": (output_file, "OUT", "write all figures, and the plan of --policy; - prints them"),
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
    to_stdout = args.json == STANDARD_OUTPUT
    with contextlib.redirect_stdout(sys.stderr) if to_stdout else contextlib.nullcontext():
        content = _compare(args)
    if to_stdout:
        print(content.decode(), end="")
    elif args.json is not None:
        args.json.write_bytes(content)
    return 0


def _compare(args: argparse.Namespace) -> bytes:
    """Compare and print; the result is what --json writes."""
    record = read_record(Path(args.lengths)) if is_record(Path(args.lengths)) else None
    topology, limits = _ranks_and_cap(args, record=record)
    costs = Costs(args.cost, args.model, args.device, record, limits.max_tokens_per_gpu or 0)
    if costs.shape is not None and topology.ep_size > 1 and not costs.shape.num_experts:
        raise BalanceError(f"--ep-size is {topology.ep_size}: {args.model} has no experts; drop it.")
    kind, rows = ("samples", None) if record is not None else rows_to_plan(args)
    option = {"padded": "sft", "packed": "sft", "masked-documents": "dataloader_inter_document_masking"}.get(kind)
    of_data = {} if option is None else {option: True}
    question = Question(costs, topology, limits, script_flags=args.script_flags, data_options=of_data)
    policies, reasons = question.policies()
    if kind == "documents":
        policies, reasons = policies[:1], ["all rows cost the same: balancing needs --data masked-documents"]
    names = [policy.name for policy in policies]
    if args.policy not in (None, *names):
        raise BalanceError(f"--policy is {args.policy!r}: it must be one of {', '.join(names)}.")
    if record is not None:
        batches = _batches_of_record(record, steps=args.steps, dp_size=topology.dp_size)
        has_more = len(batches) < sum(step.lengths.size > 0 for step in record.steps)
        filled = batches[0].row_tokens if batches[0].rows is not None else None
        words = f"the recorded rows, {'as they are' if filled is None else f'filled up to {filled} tokens'}"
    else:
        assert rows is not None
        batches = batches_of_rows(args, stock=rows, topology=topology, limits=limits)
        has_more = rows.counts.size > max(MAX_SAMPLES // args.global_batch_size, 1) * args.global_batch_size
        words = STOCKS[kind].format(args.seq_length)
        if rows.num_cut:
            reasons.append(f"{rows.num_cut} rows are longer than --seq-length {args.seq_length}: Megatron cuts them.")
    say(f"Stock: {words}.", style="bold")
    if has_more and args.steps is None:
        reasons.append(f"these are the first {len(batches)} steps; --steps plans more.")
    lengths = np.concatenate([batch.segments for batch in batches])
    say(
        f"{sum(batch.lengths.size for batch in batches)} samples in {len(batches)} steps. Lengths: mean "
        f"{lengths.mean():.0f}, median {np.median(lengths):.0f}, longest {lengths.max()} tokens. Cost: "
        f"{costs.text(topology)}."
    )
    if kind != "documents" and (lengths.mean() < FEW_TOKENS or (lengths.size > 1 and lengths.min() == lengths.max())):
        reasons.append(
            f"the lengths are {lengths.min()} to {lengths.max()} tokens: if that surprises you, see what was counted."
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
            results.append(question.judge(policy, steps, row_tokens=batches[0].row_tokens))
    stock = results[0]
    advised, sentences = recommend(results, question=question, record=record)
    bounds = [metrics.lower_bound for metrics in results[1].metrics] if len(results) > 1 else None
    shown = [result.line(stock=stock, bounds=bounds if result is stock else None) for result in results]
    if record is not None and topology == record.info.topology.with_cp_size(record.info.topology.cp_size):
        as_it_ran = Policy("as it ran", in_a_line(record.info.policy), record.info.cost_model)
        ran = [step for step in record.steps if step.lengths.size][: len(batches)]
        shown.insert(1, question.judge(as_it_ran, ran).line(stock=stock))
    timed = stock.scale.unit == "s"
    columns = {name: text for name, text in _COLUMNS.items() if timed or name not in ("step s", "tokens/s/GPU")}
    rows_shown = [[text.format(**line) for text in columns.values()] for line in shown]
    print_table(list(columns), rows_shown, strong=advised.policy.name)
    if len(shown) > 1:
        say("\n  ".join(["Flags:", *(f"{line['name']:<12}  {line['flags']}" for line in shown[1:])]))
    say(f"Recommendation, predicted by {'seconds' if timed else costs.name}: {advised.policy.name}", style="bold")
    for sentence in sentences:
        say(f"  {sentence}")
    chosen = advised if args.policy is None else results[names.index(args.policy)]
    if args.json is not None:
        say(f"All figures, and the plan of {chosen.policy.name}, are in {args.json}.")
    command = "" if advised is stock else question.command(advised.policy)
    advice = {"kind": "advice", "policy": advised.policy.name, "flags": advised.policy.flags, "command": command}
    advice |= {"speedup": advised.speedup(stock), "fits": advised.least_headroom >= 0, "sentences": sentences}
    return b"".join(map(text_of, (chosen.setting.line(), *map(line_of, chosen.steps), *shown, advice)))


def _ranks_and_cap(args: argparse.Namespace, *, record: RunRecord | None) -> tuple[Topology, Limits]:
    """Those of the flags, else of the record; a flag that has no place here, or is missing, is told before any work."""
    others = ("dp_size",) if record is None else ("key", "shuffle", "data", "seq_length")
    wrong = [name for name in ("global_batch_size", *others) if (getattr(args, name) is None) == (record is None)]
    if record is None and args.max_tokens_per_gpu is None and args.seq_length is None:
        wrong.append("max_tokens_per_gpu")
    if wrong:
        remedy = "given: a record has its own, drop it" if record else "missing: compare needs them, but for a record"
        raise BalanceError(f"{', '.join('--' + name.replace('_', '-') for name in wrong)} {remedy}.")
    names = ("dp_size", "cp_size", "tp_size", "pp_size", "ep_size")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.tp_size is not None:  # Megatron's default: experts are split as all else is
        given |= {"etp_size": args.tp_size, "sequence_parallel": args.tp_size > 1}
    recorded = Topology(1) if record is None else record.info.topology
    topology = replace(recorded.with_cp_size(recorded.cp_size), **given)
    if topology.num_gpus > MAX_GPUS or topology.pp_size > MAX_STAGES:
        raise BalanceError(
            f"--dp-size, --cp-size, --tp-size and --pp-size make {topology.num_gpus} GPUs: at most {MAX_GPUS} in "
            f"{MAX_STAGES} stages are compared."
        )
    if record is None and args.global_batch_size % topology.dp_size:
        raise BalanceError(
            f"--global-batch-size {args.global_batch_size} is no multiple of --dp-size {topology.dp_size}."
        )
    num_ranks, group = topology.dp_cp_size * topology.tp_size, topology.etp_size * topology.ep_size
    if num_ranks % group:
        raise BalanceError(
            f"--ep-size is {topology.ep_size}: experts take groups of {group} ranks, which do not divide {num_ranks}."
        )
    cap = args.max_tokens_per_gpu or (record and record.info.limits.max_tokens_per_gpu)
    if cap is None and args.seq_length is not None:
        cap = -(-args.seq_length // topology.cp_size)  # a row of stock is known to fit
    if cap is None:
        raise BalanceError("the recorded run had no token cap: give --max-tokens-per-gpu.")
    return topology, Limits(cap)


def _batches_of_record(record: RunRecord, *, steps: int | None, dp_size: int) -> Sequence[StepRecord]:
    """The steps of a record that are planned."""
    batches = [step for step in record.steps if step.lengths.size]
    if record.info.topology.dp_size != dp_size:
        rows = [np.arange(batch.lengths.size) if batch.rows is None else batch.rows for batch in batches]
        homes = [round_robin(int(of_batch.max()) + 1, dp_size=dp_size)[of_batch] for of_batch in rows]
        batches = [replace(batch, home_ranks=home) for batch, home in zip(batches, homes, strict=True)]
    if len(batches) < (steps or 1):
        raise BalanceError(f"the record has {len(batches)} steps with samples; --steps is {steps or 1}.")
    if steps is None:
        samples = np.cumsum([batch.lengths.size for batch in batches])
        steps = max(int((samples <= MAX_SAMPLES).sum()), 1)
    return batches[:steps]


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
