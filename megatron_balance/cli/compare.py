"""The subcommand `compare`: its flags, its table and its file.

Each policy plans the same global batches, and one cost model judges them all. Times are predicted from these plans:
optimiser and data loading are not in them, nor any communication but that of context-parallel ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import textwrap
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from megatron_balance.cli.advice import advise_settings, reasons, recommend
from megatron_balance.cli.costs import CompareCosts
from megatron_balance.cli.data import BLOCK, MAX_SAMPLES, ranks_and_cap, read_batches
from megatron_balance.cli.policies import Comparison, Policy, PolicyResult, parsed_flags
from megatron_balance.cli.terminal import (
    STANDARD_OUTPUT,
    count,
    in_a_line,
    integer,
    output_file,
    print_table,
    say,
    show_progress,
)
from megatron_balance.cost.calibration import Calibration
from megatron_balance.cost.model import MICROBATCH_TOKENS
from megatron_balance.errors import BalanceError
from megatron_balance.lengths import MEGATRON_SEED, STOCKS, SYNTHETIC_LENGTHS
from megatron_balance.model.hf_config import PRESETS
from megatron_balance.record import is_record, line_of, read_record, text_of
from megatron_balance.version import build_version

_EPILOG = f"""\
lengths, in the order of training:
  FILE.npy .jsonl .txt .parquet            a number of tokens for each sample, - for lines of the standard input;
                                           lists of input_ids are counted, a bare list is a packed row
  FILE.idx, or its path without .idx       a Megatron data set: the tokens of each document
  synthetic:NAME[:N]                       drawn; NAME is one of
{textwrap.fill(", ".join(SYNTHETIC_LENGTHS), 112, initial_indent=" " * 43, subsequent_indent=" " * 43)}
  RECORD                                   folder of a run with --balance-record, or a file of compare --json:
                                           its own steps, ranks, cap and costs

stock Megatron, which all are compared with (--data; files of lengths with --seq-length are padded, of lists packed):
{chr(10).join(f"  {name:<17} {words.format('N')}" for name, words in STOCKS.items())}

what samples share (--share-prefixes): their lists of tokens, of --key, are compared in blocks of {BLOCK};
of .jsonl and .parquet with --data samples

your training script's flags may follow --: what they refuse is not compared, the split of layers and FSDP count

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
  or their ids on Hugging Face, or the path of a config.json
"""

_OPTIONS: dict[str, dict[str, tuple[Any, str, str]]] = {
    "lengths": {
        "--key": (str, "NAME", "column or field of the file that holds the lengths, or lists of tokens"),
        "--seq-length": (count, "N", "Megatron's: tokens of a row of stock"),
    },
    "batch": {
        "--global-batch-size": (count, "N", "samples a step, or rows"),
        "--max-tokens-per-gpu": (count, "T", "tokens a GPU may hold in a micro-batch (default: --seq-length over CP)"),
        "--steps": (count, "K", f"global batches to plan (default: all, but at most {MAX_SAMPLES} samples)"),
    },
    "ranks, as in Megatron": {
        "--dp-size": (integer(1, 2**16), "D", "data-parallel ranks"),
        "--cp-size": (integer(1, 2**16), "C", "context-parallel ranks (default: 1)"),
        "--tp-size": (integer(1, 2**16), "P", "tensor-parallel ranks (default: 1)"),
        "--pp-size": (integer(1, 2**16), "P", "pipeline stages (default: 1)"),
        "--ep-size": (integer(1, 2**16), "E", "expert-parallel ranks (default: 1)"),
    },
    "cost": {
        "--model": (str, "MODEL", "preset, or Hugging Face config.json; its FLOPs are the cost"),
        "--cost": (str, "COST", "tokens, flops (default with --model), or a seconds.json of megatron-balance fit"),
        "--device": (count, "TFLOPS", "of a GPU in training, in all but attention: predicts seconds"),
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
    groups["lengths"].add_argument(
        "--data", choices=STOCKS, metavar="KIND", help=f"what stock trains on: {', '.join(STOCKS)}"
    )
    words = "compute once what samples of a step begin with alike"
    groups["lengths"].add_argument("--share-prefixes", action="store_const", const=True, help=words)
    parser.set_defaults(script_flags=())


def run(args: argparse.Namespace) -> int:
    """Compare every policy on your lengths, before any training or on a run that was recorded."""
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
    topology, limits = ranks_and_cap(args, record=record)
    options = parsed_flags(args.script_flags)
    if options.get("use_megatron_fsdp") or options.get("use_torch_fsdp2"):
        topology = replace(topology, fully_sharded=True)
    batches = read_batches(args, record=record, topology=topology, limits=limits)
    options |= {_OPTION_OF_DATA[batches.kind]: True} if batches.kind in _OPTION_OF_DATA else {}
    seconds = None if args.cost in (None, "tokens", "flops") else Calibration.read(Path(args.cost))
    costs = CompareCosts(args.cost, args.model, args.device, record, options, seconds)
    if costs.shape is not None and topology.ep_size > 1 and not costs.shape.num_experts:
        raise BalanceError(f"--ep-size is {topology.ep_size}: {args.model} has no experts; drop it.")
    environment: dict[str, Any] = {} if record is None else dict(record.info.environment)
    environment["date"], environment["data"] = date.today().isoformat(), in_a_line(args.lengths)
    environment["versions"] = {"megatron-balance": build_version(), "numpy": np.__version__}
    if args.model is not None:
        environment |= {"model": in_a_line(args.model), "attention_rate": costs.on(topology).attention_rate}
    shares = batches.steps[0].forest is not None
    comparison = Comparison(costs, topology, limits, environment, shares=shares)
    policies, notes = comparison.policies()
    if batches.kind == "documents":
        policies, notes = policies[:1], ["all rows cost the same: balancing needs --data masked-documents"]
    names = [policy.name for policy in policies]
    if args.policy not in (None, *names):
        raise BalanceError(f"--policy is {args.policy!r}: it must be one of {', '.join(names)}.")
    lengths = np.concatenate([step.segments for step in batches.steps])
    say(f"Stock: {batches.stock}.", style="bold")
    say(
        f"{sum(step.lengths.size for step in batches.steps)} samples in {len(batches.steps)} steps. Lengths: mean "
        f"{lengths.mean():.0f}, median {np.median(lengths):.0f}, longest {lengths.max()} tokens. Cost: "
        f"{costs.text(topology)}."
    )
    notes.append(costs.split_advice(topology, lengths))
    notes.append("" if seconds is None else seconds.extrapolation(int(lengths.max())))
    for note in filter(None, notes):
        say(f"Note: {note}", style="yellow")
    results: list[PolicyResult] = []
    for policy in policies:
        show_progress(f"planning {policy.name}")
        results.append(comparison.judge(policy, list(comparison.plan(policy, batches.steps))))
    show_progress()
    stock, advised = results[0], recommend(results, costs=costs)
    sentences = list(reasons(advised, results=results, comparison=comparison, record=record))
    lines = [result.line(stock=stock) for result in results]
    if len(results) > 1:
        lines[0] = stock.line(stock=stock, bounds=[metrics.lower_bound for metrics in results[1].metrics])
    if record is not None:
        as_it_ran = Policy("as it ran", in_a_line(record.info.policy), record.info.cost_model)
        recorded = [step for step in record.steps if step.lengths.size][: len(batches.steps)]
        lines.insert(1, comparison.judge(as_it_ran, recorded).line(stock=stock))
        sentences += advise_settings(record, comparison=comparison)
    columns = [column for column in _COLUMNS.items() if stock.scale.unit == "s" or column[0] not in _IN_SECONDS]
    rows = [[text.format(**line) for _, text in columns] for line in lines]
    print_table([name for name, _ in columns], rows, strong=advised.policy.name)
    if len(lines) > 1:
        say("\n  ".join(["Flags:", *(f"{line['name']:<14}  {line['flags']}" for line in lines[1:])]))
    say(f"Recommendation, predicted by {costs.name}: {advised.policy.name}", style="bold")
    say("\n".join(f"  {sentence}" for sentence in sentences))
    chosen = advised if args.policy is None else results[names.index(args.policy)]
    if args.json is not None:
        say(f"All figures, and the plan of {chosen.policy.name}, are in {args.json}.")
    advice = {"kind": "advice", "policy": advised.policy.name, "sentences": sentences}
    return b"".join(map(text_of, (chosen.info.line(), *map(line_of, chosen.steps), *lines, advice)))


_OPTION_OF_DATA = {"padded": "sft", "packed": "sft", "masked-documents": "dataloader_inter_document_masking"}
_IN_SECONDS = ("step s", "tokens/s/GPU")
_COLUMNS = {
    "policy": "{name}",
    "step s": "{seconds_per_step:.4g}",
    "tokens/s/GPU": "{tokens_per_second_per_gpu:.0f}",
    "speed": "{speedup:.2f}x",
    "imbalance": "{imbalance:.3f}",
    "over bound": "+{over_bound:.1%}",
    "bound waits": "{unavoidable_waiting:.1%}",
    "padding": "{padding_fraction:.1%}",
    "headroom": "{cap_headroom:.1%}",
    "CP": "{mean_cp_size:.1f}",
    "micro-batches": "{num_microbatches:.1f}",
    "plan ms": "{plan_ms:.1f}",
}
