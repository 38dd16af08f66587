"""Show what balancing would change on your sample lengths, before any training.

Lengths are taken in file order and cut into global batches. Each is dealt out four ways, from Megatron's
own sampler to what `--balance-data` would do, and all four are judged by the same cost model.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cli.policies import PolicyResult, Setting, compare_policies
from megatron_balance.cli.table import print_table
from megatron_balance.errors import BalanceError
from megatron_balance.planner.cost_choice import choose_cost_model
from megatron_balance.planner.floor_advice import floor_advice
from megatron_balance.planner.lengths import SYNTHETIC_LENGTHS, read_lengths, synthetic_lengths
from megatron_balance.planner.presets import PRESETS
from megatron_balance.planner.problem import OBJECTIVES, resolve_objective
from megatron_balance.planner.topology import Limits, Topology

MAX_STEPS = 100
"""Global batches planned when --steps is not given: enough for stable means, quick to plan."""

NOTABLE_FLOOR = 1.01
"""A sample that outweighs a rank's share by less is not worth a note."""

SYNTHETIC_STEPS = 10
"""Global batches drawn for `synthetic:NAME` when neither N nor --steps is given."""

_EPILOG = f"""\
lengths:
  FILE.npy .npz .jsonl .csv .txt .parquet, in the order of training; or synthetic:NAME[:N], drawn with --seed:
  {", ".join(SYNTHETIC_LENGTHS)}

example:
  megatron-balance plan synthetic:servegen_mlarge:4096 --global-batch-size 256 --dp-size 8 \\
      --max-tokens-per-gpu 16384 --model Qwen3-8B --json plan.json

models:
  {", ".join(PRESETS)}
  or the path of a Hugging Face config.json

columns, means over the steps:
  imbalance      cost of the slowest rank over the mean rank; 1.000 is even. Where ranks meet in every
                 micro-batch (objective microbatch): of the slowest rank in each slot, summed
  over bound     predicted step time above a lower bound that no schedule can beat
  padding        padding for context and sequence parallelism, of all tokens run
  cap headroom   room left below the token cap in the fullest micro-batch; below 0: a sample longer than the cap
  micro-batches  of one rank in one step
  plan ms        time to plan one step
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `plan`."""
    parser.epilog = _EPILOG
    parser.add_argument("lengths", metavar="LENGTHS", help="file of sample lengths, or synthetic:NAME[:N]")

    batch = parser.add_argument_group("batch")
    batch.add_argument("--global-batch-size", type=int, required=True, metavar="N", help="samples a step")
    batch.add_argument(
        "--max-tokens-per-gpu",
        type=int,
        required=True,
        metavar="T",
        help="tokens a GPU may hold in a micro-batch; longer samples run alone",
    )
    batch.add_argument(
        "--steps",
        type=int,
        metavar="K",
        help=f"global batches to plan (default: as many as there are lengths for, at most {MAX_STEPS})",
    )
    batch.add_argument("--key", metavar="NAME", help="array, column or field of the file that holds the lengths")
    batch.add_argument("--shuffle", action="store_true", help="shuffle the lengths before cutting them into batches")
    batch.add_argument(
        "--seed", type=int, default=0, metavar="S", help="of --shuffle and of synthetic lengths (default: 0)"
    )

    ranks = parser.add_argument_group("ranks, as in Megatron")
    ranks.add_argument("--dp-size", type=int, required=True, metavar="D", help="data-parallel ranks")
    ranks.add_argument("--cp-size", type=int, default=1, metavar="C", help="context-parallel ranks (default: 1)")
    ranks.add_argument("--tp-size", type=int, default=1, metavar="P", help="tensor-parallel ranks (default: 1)")
    ranks.add_argument("--pp-size", type=int, default=1, metavar="P", help="pipeline stages (default: 1)")
    ranks.add_argument("--ep-size", type=int, default=1, metavar="E", help="expert-parallel ranks (default: 1)")
    ranks.add_argument(
        "--sequence-parallel", action="store_true", help="activations are split over tensor-parallel ranks"
    )
    ranks.add_argument(
        "--microbatch-multiple",
        type=int,
        default=1,
        metavar="G",
        help="num_microbatches must be a multiple of it, as under interleaved pipelines (default: 1)",
    )

    cost = parser.add_argument_group("cost")
    cost.add_argument(
        "--model", metavar="MODEL", help="preset name, or a Hugging Face config.json; its FLOPs are the cost"
    )
    cost.add_argument(
        "--cost",
        metavar="COST",
        help="what a sample costs: tokens, flops, or a calibration.json (default: flops with --model, else tokens)",
    )

    planning = parser.add_argument_group("planning")
    planning.add_argument(
        "--objective", choices=OBJECTIVES, default="auto", help="when ranks wait for one another (default: auto)"
    )
    planning.add_argument("--algorithm", default="auto", metavar="NAME", help="how samples are packed (default: auto)")

    output = parser.add_argument_group("output")
    output.add_argument("--json", type=Path, metavar="OUT", help="write the balanced plan of every step to a file")


def run(args: argparse.Namespace) -> int:
    """Plan, print the comparison, write the plan if asked to."""
    topology = Topology(
        args.dp_size,
        cp_size=args.cp_size,
        tp_size=args.tp_size,
        pp_size=args.pp_size,
        ep_size=args.ep_size,
        microbatch_multiple=args.microbatch_multiple,
        sequence_parallel=args.sequence_parallel,
    )
    cost_name = args.cost or ("flops" if args.model else "tokens")
    setting = Setting(
        cost_model=choose_cost_model(
            cost_name, model=args.model, ep_size=args.ep_size, model_parallel_size=args.tp_size * args.cp_size
        ),
        cost_name=cost_name,
        topology=topology,
        limits=Limits(args.max_tokens_per_gpu),
        objective=resolve_objective(args.objective, topology=topology),
        algorithm=args.algorithm,
    )
    _check_counts(args.global_batch_size, steps=args.steps, seed=args.seed)
    lengths = _read(args)
    batches = _cut(lengths, global_batch_size=args.global_batch_size, steps=args.steps)
    results = compare_policies(batches, setting=setting)

    _print_inputs(lengths, batches, setting=setting)
    print_table(_COLUMNS, [_cells(result) for result in results])
    _print_conclusion(results, batches, setting=setting)
    if args.json is not None:
        _write_json(args.json, batches, balanced=results[-1], setting=setting)
        print(f"The balanced plan of every step is in {args.json}.")
    return 0


def _check_counts(global_batch_size: int, *, steps: int | None, seed: int) -> None:
    if global_batch_size < 1:
        raise BalanceError(f"--global-batch-size is {global_batch_size}: it must be at least 1.")
    if steps is not None and steps < 1:
        raise BalanceError(f"--steps is {steps}: it must be at least 1.")
    if seed < 0:
        raise BalanceError(f"--seed is {seed}: it must be 0 or more.")


def _read(args: argparse.Namespace) -> NDArray[np.int64]:
    """Lengths of a file, or drawn. Returns `[num_samples]` int64, tokens."""
    source: str = args.lengths
    if source.startswith("synthetic:"):
        _, name, *counts = source.split(":")
        if len(counts) > 1 or not all(count.isdecimal() for count in counts):
            raise BalanceError(f"LENGTHS is {source!r}: it must be synthetic:NAME or synthetic:NAME:N.")
        num_samples = int(counts[0]) if counts else (args.steps or SYNTHETIC_STEPS) * args.global_batch_size
        lengths = synthetic_lengths(name, num_samples=num_samples, seed=args.seed)
    else:
        lengths = read_lengths(source, key=args.key)
    if args.shuffle:
        lengths = np.random.default_rng(args.seed).permutation(lengths)
    return lengths


def _cut(lengths: NDArray[np.int64], *, global_batch_size: int, steps: int | None) -> list[NDArray[np.int64]]:
    """The first global batches, in order; an incomplete last one is left out, as Megatron's sampler does."""
    num_full = lengths.size // global_batch_size
    num_steps = min(num_full, MAX_STEPS) if steps is None else steps
    if num_steps > num_full or num_full == 0:
        raise BalanceError(
            f"--global-batch-size {global_batch_size} and --steps {max(num_steps, 1)} need "
            f"{max(num_steps, 1) * global_batch_size} lengths, but there are {lengths.size}: lower one of them."
        )
    return [lengths[step * global_batch_size : (step + 1) * global_batch_size] for step in range(num_steps)]


_COLUMNS = ("policy", "imbalance", "over bound", "padding", "cap headroom", "micro-batches", "plan ms")


def _cells(result: PolicyResult) -> list[str]:
    """One row of the table: means over the steps."""

    def mean(values: list[float]) -> float:
        return math.fsum(values) / len(values)

    figures = [step.metrics for step in result.steps]
    imbalances = [
        metrics.microbatch_imbalance if metrics.objective == "microbatch" else metrics.step_imbalance
        for metrics in figures
    ]
    headrooms = [metrics.cap_headroom for metrics in figures if metrics.cap_headroom is not None]
    return [
        result.label,
        f"{mean(imbalances):.3f}",
        f"+{mean([metrics.over_bound - 1 for metrics in figures]):.1%}",
        f"{mean([metrics.padding_fraction for metrics in figures]):.1%}",
        f"{mean(headrooms):.1%}",
        f"{mean([metrics.num_microbatches for metrics in figures]):.1f}",
        f"{mean([step.plan_seconds for step in result.steps]) * 1e3:.1f}",
    ]


def _print_inputs(lengths: NDArray[np.int64], batches: list[NDArray[np.int64]], *, setting: Setting) -> None:
    planned = np.concatenate(batches)
    steps = "step" if len(batches) == 1 else "steps"
    left = f"; {lengths.size - planned.size} left over" if planned.size < lengths.size else ""
    print(
        f"{len(batches)} {steps} of {batches[0].size} samples{left}. "
        f"Lengths: mean {planned.mean():.0f}, longest {planned.max()} tokens. "
        f"Cost: {setting.cost_name}. Objective: {setting.objective}."
    )


def _print_conclusion(results: list[PolicyResult], batches: list[NDArray[np.int64]], *, setting: Setting) -> None:
    cap = setting.limits.max_tokens_per_microbatch(setting.topology)
    padded = [setting.topology.padded_seq_len(batch) for batch in batches]
    num_over_long = sum(int((tokens > cap).sum()) for tokens in padded) if cap is not None else 0
    if num_over_long:
        print(f"Note: {num_over_long} samples are longer than a micro-batch's {cap} tokens; each runs alone.")
    advice = max(
        (floor_advice(batch, cost_model=setting.cost_model, topology=setting.topology) for batch in batches),
        key=lambda advice: advice.floor,
    )
    if advice.floor > NOTABLE_FLOOR:
        print(f"Note: in the worst step one sample outweighs a rank's share: {advice.message}.")
    stock, packed, _, balanced = (result.predicted_cost for result in results)
    if balanced:
        print(
            f"Predicted: the balanced step is {stock / balanced:.2f}x as fast as stock, "
            f"{packed / balanced:.2f}x as packed, by imbalance alone."
        )


def _write_json(file: Path, batches: list[NDArray[np.int64]], *, balanced: PolicyResult, setting: Setting) -> None:
    steps: list[dict[str, Any]] = [
        {
            "lengths": batch.tolist(),
            "num_microbatches": step.metrics.num_microbatches,
            "ranks": step.ranks,
            "metrics": asdict(step.metrics),
        }
        for batch, step in zip(batches, balanced.steps, strict=True)
    ]
    content = {"cost_model": asdict(setting.cost_model), "topology": asdict(setting.topology), "steps": steps}
    try:
        file.write_text(json.dumps(content) + "\n", encoding="utf-8")
    except OSError as error:
        raise BalanceError(f"--json is {str(file)!r}: it cannot be written ({error.strerror}).") from error
