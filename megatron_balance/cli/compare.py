"""Compare every policy on your lengths, before any training or on a run that was recorded.

Each policy plans the same global batches, and one cost model judges them all. Times are predicted from these plans:
optimiser and data loading are not in them, nor any communication but that of context-parallel ranks.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from megatron_balance.cli.comparison.batches import (
    GlobalBatch,
    check_counts,
    cut,
    is_record,
    read_flagged_samples,
    recorded_batches,
)
from megatron_balance.cli.comparison.cost_source import DEFAULT_EFFICIENCY, CostSource
from megatron_balance.cli.comparison.detail import named_policy, plan_file, print_plan
from megatron_balance.cli.comparison.help import EPILOG, MAX_SAMPLES
from megatron_balance.cli.comparison.recommendation import Recommendation, recommend
from megatron_balance.cli.comparison.results import Comparison, PolicyMeans, Question, as_it_ran
from megatron_balance.cli.comparison.table import print_policies
from megatron_balance.cli.flags import (
    add_batch_flags,
    add_cost_flags,
    add_lengths_flags,
    add_planning_flags,
    add_rank_flags,
    max_cp_size,
    topology_from_flags,
)
from megatron_balance.cli.json_file import write_json
from megatron_balance.cli.progress import Progress, progress_bar
from megatron_balance.errors import BalanceError
from megatron_balance.planner import is_makespan
from megatron_balance.record.run_record import RunInfo, RunRecord, read_record
from megatron_balance.topology import Limits, Topology


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `compare`."""
    parser.epilog = EPILOG
    parser.add_argument("lengths", metavar="LENGTHS", help="file of sample lengths, synthetic:NAME[:N], or a record")
    add_lengths_flags(parser)
    add_batch_flags(
        parser,
        steps_default=f"all, but at most {MAX_SAMPLES['step']} samples, or "
        f"{MAX_SAMPLES['slots']} where ranks meet in every micro-batch or in a pipeline, or {MAX_SAMPLES['groups']} "
        "where several expert-parallel groups do",
    )
    add_rank_flags(parser)
    cost = add_cost_flags(parser)
    cost.add_argument(
        "--peak-tflops", type=float, metavar="P", help="dense TFLOPS of one GPU in training precision: gives seconds"
    )
    cost.add_argument(
        "--efficiency",
        type=float,
        metavar="E",
        help=f"fraction of it that your training reaches (default: {DEFAULT_EFFICIENCY}, an assumption)",
    )
    add_planning_flags(
        parser,
        objective_default="auto, from the ranks; of a record, the run's",
        dynamic_cp_help="the policy dynamic CP is compared anyway; SIZE is the largest context-parallel size of a "
        "micro-batch (default: all data- and context-parallel ranks)",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--policy", metavar="NAME", help="show this policy's plan: its first step; with --json, all steps"
    )
    output.add_argument(
        "--json", type=Path, metavar="OUT", help="write all figures to a file; with --policy, its plan, for report"
    )


def run(args: argparse.Namespace) -> int:
    """Compare, print, and write the file asked for."""
    started, cpu_started = time.perf_counter(), time.process_time()
    record = read_record(Path(args.lengths)) if is_record(args.lengths) else None
    topology, limits = _ranks_and_cap(args, record=record)
    question = Question(
        costs=CostSource.from_flags(args, record=record),
        objective=args.objective or (None if record is None else record.info.objective),
        algorithm=args.algorithm,
        max_cp_size=max_cp_size(args),
    )
    # Wrong flags are reported before long work.
    rate, setting = question.costs.rate(topology), question.setting(topology, limits=limits)
    most_samples = _most_samples(setting)
    batches = _batches(args, record=record, dp_size=topology.dp_size, most_samples=most_samples)
    print(_inputs(batches, cost=question.costs.text(topology)))
    extrapolation = question.costs.extrapolation(max(int(batch.segment_lengths.max()) for batch in batches))
    if extrapolation:
        print(f"Note: {extrapolation}")

    content: dict[str, Any] = {
        "topology": asdict(topology),
        "limits": asdict(limits),
        "cost_name": setting.cost_name,
        "num_steps": len(batches),
        "num_samples": sum(batch.num_samples for batch in batches),
        "rate": asdict(rate),
    }
    num_policies = len(question.policies(setting))
    with progress_bar("planning") as progress:
        after_step = _counter(progress, total=num_policies * len(batches))
        comparison = question.compare(batches, topology=topology, limits=limits, after_step=after_step)
    shown, advice = _conclude(comparison, question=question, record=record, topology=topology)
    content["policies"] = [asdict(figures) for figures in shown]
    content["measured_imbalance"] = question.costs.measured_imbalance
    content["recommendation"] = asdict(advice)
    num_samples = content["num_samples"]
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    content |= {"seconds": seconds, "cpu_seconds": cpu_seconds}
    if args.policy is not None:
        result = named_policy(comparison.results, name=args.policy)
        print_plan(result)
        content = plan_file(result)
    if args.json is not None:
        write_json(args.json, content, indent=1)
        print(f"{'All figures are' if args.policy is None else 'The plan of every step is'} in {args.json}.")
    print(f"Compared {num_policies} policies on {num_samples} samples in {seconds:.1f} s ({cpu_seconds:.1f} s of CPU).")
    return 0


def _ranks_and_cap(args: argparse.Namespace, *, record: RunRecord | None) -> tuple[Topology, Limits]:
    """Those of the flags, else of the record."""
    if record is None:
        wanted = ("--global-batch-size", "--dp-size", "--max-tokens-per-gpu")
        missing = [flag for flag in wanted if getattr(args, flag[2:].replace("-", "_")) is None]
        if missing:
            raise BalanceError(
                f"{', '.join(missing)} missing: compare needs them, unless LENGTHS is the folder of a record."
            )
        return topology_from_flags(args), Limits(args.max_tokens_per_gpu)
    if args.global_batch_size is not None:
        raise BalanceError("--global-batch-size is given with a recorded run, whose steps are fixed: drop it.")
    cap = args.max_tokens_per_gpu or record.info.limits.max_tokens_per_gpu
    if cap is None:
        raise BalanceError("the recorded run had no token cap: give --max-tokens-per-gpu.")
    return topology_from_flags(args, base=_at_one_size(record.info.topology)), Limits(cap)


def _at_one_size(topology: Topology) -> Topology:
    return topology.at_cp_size(topology.cp_size)


def _batches(
    args: argparse.Namespace, *, record: RunRecord | None, dp_size: int, most_samples: int
) -> list[GlobalBatch]:
    """The steps to plan."""
    check_counts(args.global_batch_size or 1, steps=args.steps)
    if record is not None:
        batches = recorded_batches(record, dp_size=dp_size)[: args.steps]
        if not batches:
            raise BalanceError(f"{args.lengths!r} holds no step with samples: the run wrote none yet.")
        return batches
    samples = read_flagged_samples(args, global_batch_size=args.global_batch_size)
    most = max(most_samples // args.global_batch_size, 1)
    batches = cut(samples, global_batch_size=args.global_batch_size, steps=args.steps, max_steps=most)
    num_steps = samples.num_samples // args.global_batch_size
    if args.steps is None and len(batches) < num_steps:
        print(f"Planned are the first {len(batches)} of {num_steps} steps; --steps {num_steps} for all.")
    return batches


def _most_samples(setting: RunInfo) -> int:
    """Samples to plan without `--steps`."""
    if setting.objective != "microbatch" and not is_makespan(setting.objective, topology=setting.topology):
        return MAX_SAMPLES["step"]
    in_groups = 1 < setting.topology.ep_span < setting.topology.dp_size
    return MAX_SAMPLES["groups" if in_groups else "slots"]


def _counter(progress: Progress, *, total: int) -> Callable[[], None]:
    done = 0

    def after_step() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    return after_step


def _inputs(batches: Sequence[GlobalBatch], *, cost: str) -> str:
    lengths = np.concatenate([batch.segment_lengths for batch in batches])
    sizes = sorted({batch.num_samples for batch in batches})
    size = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    steps = "step" if len(batches) == 1 else "steps"
    return (
        f"{len(batches)} {steps} of {size} samples. Lengths: mean {lengths.mean():.0f}, median "
        f"{np.median(lengths):.0f}, longest {lengths.max()} tokens. Cost: {cost}."
    )


def _conclude(
    comparison: Comparison, *, question: Question, record: RunRecord | None, topology: Topology
) -> tuple[list[PolicyMeans], Recommendation]:
    """Print the table, the flags and the recommendation."""
    shown = [comparison.figures(result) for result in comparison.results]
    if record is not None and topology == _at_one_size(record.info.topology):
        setting = comparison.setting
        if record.info.topology.dynamic_cp:
            setting = question.setting(record.info.topology, limits=setting.limits)
        shown.insert(1, comparison.figures(as_it_ran(record, batches=comparison.batches, setting=setting)))
    advice = recommend(comparison, question=question, results=comparison.results)
    print_policies(shown, comparison=comparison, advised=advice.policy)
    if question.costs.measured_imbalance is not None:
        print(f"Measured in the run: slowest over mean {question.costs.measured_imbalance:.3f}.")
    how = "measured seconds of micro-batches" if comparison.setting.cost_name == "seconds" else "imbalance"
    if comparison.counts_communication:
        how += " and what context-parallel ranks receive"
    elif how == "imbalance":
        how += " alone"
    print(f"Recommendation, predicted by {how}:")
    for sentence in advice.sentences:
        print(f"  {sentence}")
    return shown, advice
