"""Compare every policy on your lengths, before any training or on a run that was recorded.

Each policy plans the same global batches, and one cost model judges them all. Times are predicted from these plans:
optimiser and data loading are not in them, nor any communication but that of context-parallel ranks.
"""

from __future__ import annotations

import argparse
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cli.costs import Costs
from megatron_balance.cli.policies import Policy, PolicyResult, Question, recommend
from megatron_balance.cost.model import MICROBATCH_TOKENS, CostModel
from megatron_balance.cost.rates import profiles
from megatron_balance.errors import BalanceError
from megatron_balance.lengths import SYNTHETIC_LENGTHS, read_lengths, synthetic_lengths
from megatron_balance.model.hf_config import PRESETS
from megatron_balance.planner import Problem
from megatron_balance.record import RunRecord, is_record, line_of, read_record, text_of
from megatron_balance.record.step import dealt
from megatron_balance.topology import Limits, Topology

MAX_SAMPLES = 2**13  # planned without --steps, so that planning takes seconds
SYNTHETIC_STEPS = 10  # global batches of `synthetic:NAME` without N and --steps

_EPILOG = f"""\
lengths, in the order of training:
  FILE.npy .npz .jsonl .csv .txt .parquet  a number of tokens for each sample
  FILE.idx                                 index of a Megatron data set: the tokens of each document
  synthetic:NAME[:N[:SEED]]                drawn; NAME is one of
{textwrap.fill(", ".join(SYNTHETIC_LENGTHS), 112, initial_indent=" " * 43, subsequent_indent=" " * 43)}
  RECORD                                   folder of a run with --balance-record, or a file of compare --json:
                                           its own steps, ranks, cap and costs

examples:
  megatron-balance compare my_corpus.idx --global-batch-size 256 --dp-size 8 --max-tokens-per-gpu 16384 \\
      --model Qwen3-8B --device 400
  megatron-balance compare runs/record --model Qwen3-8B

policies (their flags are printed below the table):
  stock         Megatron's own sampler: sample i on rank i % dp_size, one sample a micro-batch
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
  headroom       room below the cap in the fullest micro-batch of all steps; below 0, one sample is longer than the cap
  CP             ranks that share a token by context parallelism

FLOPs are those this package plans by: causal attention once, 3x for a GEMM and 3.5x for attention, no recomputation,
{MICROBATCH_TOKENS} tokens a micro-batch for launches. With --tp-size activations are split by sequence parallelism.

models:
{textwrap.fill(", ".join(PRESETS), 112, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)}
  or the path of a Hugging Face config.json, or its sizes: hidden_size=4096,num_hidden_layers=36,num_attention_heads=32,
  num_key_value_heads=8,intermediate_size=12288,vocab_size=151936
"""


def integer(least: int) -> Callable[[str], int]:
    """The type of a flag: an integer of at least `least`."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"is {text}: it must be an integer of at least {least}.")
        return int(text)

    return read


def output_file(text: str) -> Path:
    """A file to write, the value of a flag: its folder is made, and the file opened, before anything is computed."""
    path = Path(text)
    try:
        new = not path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
        if new:
            path.unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"is {text!r}: it cannot be written ({error.strerror}).") from error
    return path


count = integer(1)

_OPTIONS: dict[str, dict[str, tuple[Any, str, str]]] = {
    "lengths": {"--key": (str, "NAME", "array, column or field of the file that holds the lengths")},
    "batch": {
        "--global-batch-size": (count, "N", "samples a step"),
        "--max-tokens-per-gpu": (count, "T", "tokens a GPU may hold in a micro-batch; longer samples run alone"),
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
        "--json": (output_file, "OUT", "write all figures, and the plan of --policy (default: the recommended)"),
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
    words = "shuffle the lengths first, by this seed (0)"
    groups["lengths"].add_argument("--shuffle", nargs="?", type=integer(0), const=0, metavar="SEED", help=words)


def run(args: argparse.Namespace) -> int:
    """Compare, print, and write the file asked for."""
    record = read_record(Path(args.lengths)) if is_record(Path(args.lengths)) else None
    topology, limits = _ranks_and_cap(args, record=record)
    costs = Costs(args.cost, args.model, args.device, record, limits.max_tokens_per_gpu or 0)
    question = Question(costs, topology, limits)
    policies = question.policies()
    names = [policy.name for policy in policies]
    if args.policy not in (None, *names):
        raise BalanceError(
            f"--policy is {args.policy!r}: it must be one of {', '.join(names)}. --model adds policies by FLOPs, "
            "--cost seconds.json the calibrated one."
        )
    if costs.shape is not None and topology.ep_size > 1 and not costs.shape.num_experts:
        raise BalanceError(f"--ep-size is {topology.ep_size}: {args.model} has no experts; drop it.")
    batches = _batches(args, record=record, topology=topology, limits=limits)
    lengths = np.concatenate([batch.segments for batch in batches])
    print(
        f"{sum(batch.lengths.size for batch in batches)} samples in {len(batches)} steps. Lengths: mean "
        f"{lengths.mean():.0f}, median {np.median(lengths):.0f}, longest {lengths.max()} tokens. Cost: "
        f"{costs.text(topology)}."
    )
    if costs.calibration is not None and (notice := costs.calibration.extrapolation(int(lengths.max()))):
        print(f"Note: {notice}")
    refusal = costs.why_not_dynamic(replace(topology, dynamic_cp=True))
    if refusal and costs.name != "tokens":
        print(f"Note: dynamic CP is not compared: {refusal}")
    results = [question.plan(policy, batches) for policy in policies]
    stock = results[0]
    advised, sentences = recommend(results)
    shown = [result.line(stock=stock) for result in results]
    if record is not None and topology == record.info.topology.at_cp_size(record.info.topology.cp_size):
        as_it_ran = Policy("as it ran", record.info.policy, record.info.cost_model)
        ran = [step for step in record.steps if step.lengths.size][: len(batches)]
        shown.insert(1, question.judge(as_it_ran, ran).line(stock=stock))
    timed = stock.scale.unit == "s"
    _print_policies(shown, timed=timed)
    print(f"Recommendation, predicted by {'seconds' if timed else costs.name}:", *sentences, sep="\n  ")
    if costs.rates is not None and advised is not stock:
        gains = [_gain(question, advised, stock=stock, factor=factor) for factor in (0.5, 2.0)]
        print(
            "  If attention ran at half or twice that rate, these plans would gain {:.2f}x or {:.2f}x.".format(*gains)
        )
    chosen = advised if args.policy is None else results[names.index(args.policy)]
    if args.policy is not None:
        _print_plan(chosen)
    if args.json is not None:
        advice = {"kind": "advice", "policy": advised.policy.name, "flags": advised.policy.flags, "fits": advised.fits}
        advice |= {"speedup": advised.speedup(stock), "sentences": sentences}
        lines = (chosen.setting.line(), *map(line_of, chosen.steps), *shown, advice)
        args.json.write_bytes(b"".join(map(text_of, lines)))
        print(f"All figures, and the plan of {chosen.policy.name}, are in {args.json}.")
    return 0


def _gain(question: Question, planned: PolicyResult, *, stock: PolicyResult, factor: float) -> float:
    """Speed-up over stock of plans as they are, where attention runs at a multiple of the device's rate."""
    question = replace(question, costs=replace(question.costs, attention_factor=factor))
    before, after = (question.judge(each.policy, each.steps) for each in (stock, planned))
    return after.speedup(before)


def _ranks_and_cap(args: argparse.Namespace, *, record: RunRecord | None) -> tuple[Topology, Limits]:
    """Those of the flags, else of the record; a flag that has no place here, or is missing, is told before any work."""
    others = ("dp_size", "max_tokens_per_gpu") if record is None else ("key", "shuffle")
    wrong = [name for name in ("global_batch_size", *others) if (getattr(args, name) is None) == (record is None)]
    if wrong:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
        remedy = "compare needs it, unless LENGTHS is a record" if record is None else "a record has its own, drop it"
        raise BalanceError(f"{flags} {'missing' if record is None else 'given'}: {remedy}.")
    names = ("dp_size", "cp_size", "tp_size", "pp_size", "ep_size")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.tp_size is not None:  # Megatron's default: experts are split as all else is
        given |= {"etp_size": args.tp_size, "sequence_parallel": args.tp_size > 1}
    recorded = Topology(1) if record is None else record.info.topology
    topology = replace(recorded.at_cp_size(recorded.cp_size), **given)
    num_ranks, group = topology.num_leaves * topology.tp_size, topology.etp_size * topology.ep_size
    if num_ranks % group:
        raise BalanceError(
            f"--ep-size is {topology.ep_size}: experts take groups of {group} ranks (--ep-size times --tp-size), which "
            f"do not divide the {num_ranks} ranks of a pipeline stage."
        )
    cap = args.max_tokens_per_gpu or (record and record.info.limits.max_tokens_per_gpu)
    if cap is None:
        raise BalanceError("the recorded run had no token cap: give --max-tokens-per-gpu.")
    return topology, Limits(cap)


def _batches(
    args: argparse.Namespace, *, record: RunRecord | None, topology: Topology, limits: Limits
) -> Sequence[Problem]:
    """The global batches to plan, in the order of training, without an incomplete last one, as in Megatron."""
    dp_size, size, steps = topology.dp_size, args.global_batch_size, args.steps
    if record is None:
        lengths = _lengths(args, most=(steps or SYNTHETIC_STEPS) * size)
        num_steps = steps or max(lengths.size // size, 1)
        if lengths.size < num_steps * size:
            raise BalanceError(
                f"--global-batch-size {size} and --steps {num_steps} need {num_steps * size} lengths, but there are "
                f"{lengths.size}: lower one of them."
            )
        shared: dict[str, Any] = {"cost_model": CostModel.tokens(), "topology": topology, "limits": limits}
        rows = lengths[: num_steps * size].reshape(num_steps, size)
        batches = [Problem.of(row, home_ranks=dealt(size, dp_size=dp_size), **shared) for row in rows]
    else:
        batches = [step for step in record.steps if step.lengths.size]
        if record.info.topology.dp_size != dp_size:
            batches = [replace(one, home_ranks=dealt(one.lengths.size, dp_size=dp_size)) for one in batches]
        if len(batches) < (steps or 1):
            raise BalanceError(f"the record has {len(batches)} steps with samples; --steps is {steps or 1}.")
    if steps is None:
        samples = np.cumsum([batch.lengths.size for batch in batches])
        steps = max(int((samples <= MAX_SAMPLES).sum()), 1)
        if steps < len(batches):
            print(f"Planned are the first {steps} of {len(batches)} steps; --steps {len(batches)} for all.")
    return batches[:steps]


def _lengths(args: argparse.Namespace, *, most: int) -> NDArray[np.int64]:
    """All lengths of LENGTHS, in the order of training; `most` are drawn where it gives no N."""
    kind, *names = args.lengths.split(":")
    if kind != "synthetic" or not names:
        lengths = read_lengths(args.lengths, key=args.key)
    elif args.key is not None:
        raise BalanceError(f"--key is {args.key!r} and LENGTHS is {args.lengths!r}, which has no columns: drop --key.")
    elif len(names) > 3 or not all(number.isdecimal() for number in names[1:]):
        raise BalanceError(f"LENGTHS is {args.lengths!r}: it must be synthetic:NAME, :NAME:N or :NAME:N:SEED.")
    else:
        num_samples, seed = map(int, [*names[1:], *(most, 0)[len(names) - 1 :]])
        lengths = synthetic_lengths(names[0], num_samples=num_samples, seed=seed)
    if args.shuffle is not None:
        lengths = lengths[np.random.default_rng(args.shuffle).permutation(lengths.size)]
    return lengths


_COLUMNS = {
    "policy": "{name}",
    "step s": "{seconds_per_step:.4g}",
    "tokens/s/GPU": "{tokens_per_second_per_gpu:.0f}",
    "speed": "{speedup:.2f}x",
    "imbalance": "{imbalance:.3f}",
    "over bound": "+{over_bound:.1%}",
    "padding": "{padding:.1%}",
    "headroom": "{cap_headroom:.1%}",
    "CP": "{mean_cp_size:.1f}",
    "micro-batches": "{num_microbatches:.1f}",
    "plan ms": "{plan_ms:.1f}",
}


def _print_policies(shown: Sequence[dict[str, Any]], *, timed: bool) -> None:
    """Print one row per policy, stock first, and the flags of each."""
    columns = {name: text for name, text in _COLUMNS.items() if timed or name not in ("step s", "tokens/s/GPU")}
    print_table(list(columns), [[text.format(**one) for text in columns.values()] for one in shown])
    width = max(len(one["name"]) for one in shown)
    print("Flags:", *(f"{one['name']:<{width}}  {one['flags']}" for one in shown[1:]), sep="\n  ")


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
    print(f"Step 1 under {result.policy.name}:")
    print_table(["rank", "micro-batches x CP", "samples", "tokens", "longest", "cost over mean"], rows)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows under their column names, the first column to the left."""
    cells = [list(map(str, row)) for row in (columns, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in cells]
    print("\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]]))
