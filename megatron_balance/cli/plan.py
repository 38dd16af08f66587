"""Show what balancing would change on your sample lengths, before any training.

Lengths are taken in file order and cut into global batches. Each is planned in four ways, from Megatron's own
sampler to `--balance-data`, and in a fifth with `--balance-context-parallel`. One cost model judges all of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_balance.cli.comparison.batches import GlobalBatch, check_counts, cut, images_text, read_flagged_samples
from megatron_balance.cli.comparison.cost_source import CostSource, check_cp_bandwidth
from megatron_balance.cli.comparison.policies import Policy, PolicyResult, token_policies
from megatron_balance.cli.comparison.recommendation import NOTABLE_FLOOR
from megatron_balance.cli.comparison.results import Comparison, Question
from megatron_balance.cli.comparison.shapes import Shapes, shapes_of
from megatron_balance.cli.flags import (
    LENGTHS_HELP,
    MODELS_HELP,
    add_batch_flags,
    add_cost_flags,
    add_lengths_flags,
    add_planning_flags,
    add_rank_flags,
    asks_for_dynamic_cp,
    max_cp_size,
    topology_from_flags,
)
from megatron_balance.cli.group_table import print_groups
from megatron_balance.cli.json_file import write_json
from megatron_balance.cli.table import print_table
from megatron_balance.errors import BalanceError
from megatron_balance.mcore.setup.shape_buckets import bucketed_limits
from megatron_balance.planner.floor_advice import floor_advice
from megatron_balance.planner.metrics import ScheduleMetrics
from megatron_balance.planner.objectives import OBJECTIVES
from megatron_balance.record.judging import samples_of_ranks
from megatron_balance.record.run_record import RunInfo
from megatron_balance.record.step import StepRecord
from megatron_balance.topology import Limits

MAX_STEPS = 100
"""Global batches planned when --steps is not given: enough for stable means, quick to plan."""

_EPILOG = f"""\
{LENGTHS_HELP}

examples:
  megatron-balance plan synthetic:servegen_mlarge:4096 --global-batch-size 256 --dp-size 8 \\
      --max-tokens-per-gpu 16384 --model Qwen3-8B --json plan.json
  megatron-balance plan synthetic:servegen_mlarge:4096 --global-batch-size 256 --dp-size 8 --cp-size 4 \\
      --max-tokens-per-gpu 4096 --model Qwen3-8B --balance-context-parallel

{MODELS_HELP}

columns, means over the steps:
  imbalance      cost of the slowest rank over the mean rank; 1.000 is even. Where ranks meet in every
                 micro-batch (objective microbatch): of the slowest rank in each slot, summed
  over bound     predicted step time above a lower bound that no schedule can beat
  padding        padding for context and sequence parallelism and for --shape-bucket, of all tokens run
  cap headroom   room left below the token cap in the fullest micro-batch; below 0: a sample longer than the cap
  micro-batches  of one rank in one step
  shapes         distinct token counts of micro-batches, over all ranks and steps
  plan ms        time to plan one step
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `plan`."""
    parser.epilog = _EPILOG
    parser.add_argument("lengths", metavar="LENGTHS", help="file of sample lengths, or synthetic:NAME[:N]")
    add_lengths_flags(parser)
    add_batch_flags(parser, required=True, steps_default=f"as many as there are lengths for, at most {MAX_STEPS}")
    add_rank_flags(parser, required=True)
    add_cost_flags(parser)
    add_planning_flags(
        parser,
        objective_default="auto, from the ranks",
        dynamic_cp_help="each micro-batch has a context-parallel size of its own, a power of two up to SIZE or all "
        "data- and context-parallel ranks; communication is counted, at one size too",
    )
    parser.add_argument(
        "--shape-bucket",
        type=int,
        default=1,
        metavar="N",
        help="--balance-shape-bucket of the run: micro-batches are filled up to a multiple of N tokens on a GPU "
        "(default: 1, not at all)",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", type=Path, metavar="OUT", help="write the balanced plan of every step to a file")


def run(args: argparse.Namespace) -> int:
    """Plan, print the comparison, write the plan if asked to."""
    topology = topology_from_flags(args)
    limits = bucketed_limits(
        Limits(args.max_tokens_per_gpu),
        topology=topology,
        shape_bucket=args.shape_bucket,
        flag="--shape-bucket",
    )
    dynamic = asks_for_dynamic_cp(args)
    check_cp_bandwidth(args)
    question = Question(
        costs=CostSource(args.cost, args.model, cp_bandwidth=args.cp_bandwidth, counts_communication=dynamic),
        objective=args.objective,
        algorithm=args.algorithm,
        max_cp_size=max_cp_size(args),
        has_images=args.image_key is not None,
    )
    setting = question.setting(topology, limits=limits)  # wrong flags are reported before long work
    check_counts(args.global_batch_size, steps=args.steps)
    samples = read_flagged_samples(args, global_batch_size=args.global_batch_size)
    batches = cut(samples, global_batch_size=args.global_batch_size, steps=args.steps, max_steps=MAX_STEPS)
    policies = [*token_policies(max_tokens_per_gpu=limits.max_tokens_per_gpu), _balanced(question, setting)]
    if dynamic:
        policies.append(_dynamic(question, policies[-1], setting=setting))
    comparison = question.compare(batches, topology=topology, limits=limits, policies=policies)
    results = comparison.results

    _print_inputs(samples, batches, setting=setting)
    shapes = [shapes_of(result, shape_bucket=args.shape_bucket) for result in results]
    print_table(_COLUMNS, [_cells(result, of) for result, of in zip(results, shapes, strict=True)])
    _print_conclusion(comparison)
    if dynamic:
        print_groups(results[-1].steps[0], metrics=results[-1].metrics[0], steps_metrics=results[-1].metrics)
    if args.json is not None:
        write_json(args.json, _plan_file(results[-1], batches))
        print(f"The balanced plan of every step is in {args.json}.")
    return 0


_LABELS = {
    "stock": "stock sampler, one sample a micro-batch",
    "packed": "packed (--use-dynamic-batch-size)",
    "balance-data": "tokens, first fit (--balance-data)",
}


def _balanced(question: Question, setting: RunInfo) -> Policy:
    """The plan that the command is about, at one context-parallel size."""
    algorithm = question.algorithm
    named = "" if algorithm == "auto" else f", {algorithm}"
    if setting.cost_name == "flops":
        label = f"FLOPs{named} (--balance-data --balance-by-flops)"
    elif setting.cost_name == "seconds":
        label = f"seconds{named} (--balance-data --balance-by-flops --balance-cost)"
    else:
        # Training flags pack tokens first fit; with --model there is more to even out.
        label = f"tokens{named or ', level packing'} (from Python)"
    costs = question.costs
    planning = costs.calibrated_model(setting.topology) or costs.flops_model(setting.topology)
    if setting.cost_name == "tokens":
        planning = setting.cost_model
    return Policy(label, flags="", cost_model=planning, algorithm=algorithm)


def _dynamic(question: Question, policy: Policy, *, setting: RunInfo) -> Policy:
    """The same with a context-parallel size for each micro-batch.

    Raises:
        BalanceError: they cannot be planned, or trained with.
    """
    why_not = question.why_not_dynamic(setting)
    if why_not is not None:
        raise BalanceError(f"--balance-context-parallel is given: {why_not.rstrip('.')}.")
    unit = "seconds" if setting.cost_name == "seconds" else "FLOPs"
    return replace(
        question.dynamic_policy(policy, topology=setting.topology),
        name=f"{unit}, dynamic CP (and --balance-context-parallel)",
    )


_COLUMNS = ("policy", "imbalance", "over bound", "padding", "cap headroom", "micro-batches", "shapes", "plan ms")


def _label(result: PolicyResult) -> str:
    return _LABELS.get(result.policy.name, result.policy.name)


def _cells(result: PolicyResult, shapes: Shapes) -> list[str]:
    """One row of the table: means over the steps."""
    by_slots = OBJECTIVES[result.metrics[0].objective].waits_in_slots()
    return [
        _label(result),
        f"{result.mean(lambda figures: figures.microbatch_imbalance if by_slots else figures.step_imbalance):.3f}",
        f"+{result.mean(lambda figures: figures.over_bound - 1):.1%}",
        f"{1 - (1 - result.mean(lambda figures: figures.padding_fraction)) * (1 - shapes.filler):.1%}",
        f"{result.mean(lambda figures: figures.cap_headroom or 0.0):.1%}",
        f"{result.mean(lambda figures: figures.num_microbatches):.1f}",
        str(shapes.num_shapes),
        f"{result.mean_plan_seconds * 1e3:.1f}",
    ]


def _print_inputs(samples: GlobalBatch, batches: Sequence[GlobalBatch], *, setting: RunInfo) -> None:
    planned = np.concatenate([batch.segment_lengths for batch in batches])
    steps = "step" if len(batches) == 1 else "steps"
    left = f"; {samples.num_samples - planned.size} left over" if planned.size < samples.num_samples else ""
    print(
        f"{len(batches)} {steps} of {batches[0].num_samples} samples{left}. "
        f"Lengths: mean {planned.mean():.0f}, longest {planned.max()} tokens. {images_text(batches)}"
        f"Cost: {setting.cost_name}. Objective: {setting.objective}."
    )


def _print_conclusion(comparison: Comparison) -> None:
    setting, batches, balanced = comparison.setting, comparison.batches, comparison.results[-1]
    topology = balanced.setting.topology
    largest = topology.at_cp_size(topology.dynamic_cp_sizes[-1])
    cap = setting.limits.max_tokens_per_microbatch(largest)
    padded = [largest.padded_seq_len(batch.segment_lengths) for batch in batches]
    num_over_long = sum(int((tokens > cap).sum()) for tokens in padded) if cap is not None else 0
    if num_over_long:
        print(f"Note: {num_over_long} samples are longer than a micro-batch's {cap} tokens; each runs alone.")
    advice = max(
        (
            floor_advice(batch.segment_lengths, cost_model=setting.cost_model, topology=setting.topology)
            for batch in batches
        ),
        key=lambda advice: advice.floor,
    )
    if advice.floor > NOTABLE_FLOOR and batches[0].image_patches is None:
        at_one_size = ", at one context-parallel size" if topology.dynamic_cp else ""
        print(f"Note: in the worst step one sample outweighs a rank's share{at_one_size}: {advice.message}.")
    stock, packed, _, *_ = comparison.results
    by = "imbalance and what context-parallel ranks receive" if comparison.counts_communication else "imbalance alone"
    if balanced.predicted_cost:
        print(
            f"Predicted: the balanced step is {comparison.speedup(balanced, over=stock):.2f}x as fast as stock, "
            f"{comparison.speedup(balanced, over=packed):.2f}x as packed, by {by}."
        )
    if topology.dynamic_cp:
        fixed = comparison.results[-2]
        gain, free = (comparison.speedup(balanced, over=fixed, free=free) for free in (False, True))
        print(f"Dynamic CP is {gain:.2f}x the plan at CP {topology.cp_size}, {free:.2f}x were communication free.")


def _file_metrics(metrics: ScheduleMetrics) -> dict[str, Any]:
    """Metrics under the names of the file format, one of which differs from the attribute."""
    content = asdict(metrics)
    content["moved_tokens_unlabelled"] = content.pop("moved_tokens_before_relabel")
    return content


def _plan_file(balanced: PolicyResult, batches: Sequence[GlobalBatch]) -> dict[str, Any]:
    """The content of `--json`: the balanced plan of every step; with dynamic sizes ranks are leaves."""
    setting = balanced.setting
    return {
        "cost_model": asdict(setting.cost_model),
        "cost_name": setting.cost_name,
        "topology": asdict(setting.topology),
        "limits": asdict(setting.limits),
        "steps": [
            {
                "lengths": step.segment_lengths.tolist(),
                **({} if batch.image_patches is None else {"image_patches": batch.image_patches}),
                "num_microbatches": step.num_microbatches,
                "ranks": samples_of_ranks(step),
                **_cp_sizes(step),
                "metrics": _file_metrics(metrics),
            }
            for step, metrics, batch in zip(balanced.steps, balanced.metrics, batches, strict=True)
        ],
    }


def _cp_sizes(step: StepRecord) -> dict[str, Any]:
    """`cp_sizes[leaf][slot]`, where sizes differ."""
    if step.cp_sizes is None:
        return {}
    sizes: list[list[int]] = step.cp_sizes.tolist()
    return {"cp_sizes": [[size for size in of_leaf if size] for of_leaf in sizes]}
