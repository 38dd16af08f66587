"""Plans of samples that share prompts, over their bound and beside whole groups.

Whole groups are the same planner with a group as a sample.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np

from benchmarks.planner.setups import add_length_options, draw_rollouts, lengths_folder, lengths_said
from benchmarks.publish import Measured, table
from megatron_balance import CostModel, Forest, Limits, Topology, build_data_schedule
from megatron_balance.planner.batch import ForestBatch, batch_of
from megatron_balance.planner.level_packing import plan_slots
from megatron_balance.planner.piece_packing import _merged
from megatron_balance.planner.problem import Problem

TITLE = "Pieces of shared prompts"

COST = CostModel(linear=26_396, quadratic=1, per_microbatch=128 * 26_396)
"""Qwen3-8B: training FLOPs of a token over those of a squared token."""

SETS = ("gsm8k_sft", "azure_conv", "servegen_mlarge", "alpaca_eval", "reasoning_gym")
SIZES = ((32, 8), (64, 32))
RESPONSES, CAP, SYSTEM_TOKENS = 8, 16_384, 1500
BAR = 1.08
"""The largest distance from the bound."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--sets", nargs="+", default=SETS, metavar="NAME", help="sets of lengths")
    add_length_options(parser)


def measure(args: argparse.Namespace) -> Measured:
    """Plans rollouts of each set, without, with one and with four system prompts above the groups."""
    folder, rows, problems = lengths_folder(args), list[dict[str, Any]](), list[str]()
    for name, (groups, ranks) in product(args.sets, SIZES):
        for systems, objective in product((0, 1, 4), ("step", "microbatch")):
            forest, group_of = _forest(name, folder, groups=groups, systems=systems)
            row = _row(forest, group_of, ranks=ranks, objective=objective)
            rows.append({"set": name, "groups": groups, "ranks": ranks, "systems": systems, **row})
            sys.stderr.write(f"{rows[-1]}\n")
            if row["over_bound"] > BAR:
                problems.append(f"{name}, {groups} groups, {systems} system prompts, {objective}: {row}")
    return Measured({"lengths": lengths_said(folder), "rows": rows}, raw=rows, problems=problems)


def _forest(name: str, folder: Any, *, groups: int, systems: int) -> tuple[Forest, Any]:
    """Groups of responses to prompts of like length, below none or several system prompts."""
    prompts, responses = draw_rollouts(
        name,
        groups=groups,
        responses=RESPONSES,
        longest=CAP // 2,
        folder=folder,
        draw=np.random.default_rng(1),
    )
    group_of, above = np.arange(groups).repeat(RESPONSES), np.arange(groups) % max(systems, 1) if systems else -1
    tokens = np.concatenate([np.full(systems, SYSTEM_TOKENS), prompts, responses.ravel()])
    parent = np.concatenate([np.full(systems, -1), np.broadcast_to(above, groups), systems + group_of])
    return Forest.from_nodes(tokens, parent, systems + groups + np.arange(groups * RESPONSES)), group_of


def _row(forest: Forest, group_of: Any, *, ranks: int, objective: str) -> dict[str, Any]:
    arguments: Any = {"cost_model": COST, "topology": Topology(ranks), "limits": Limits(CAP), "objective": objective}
    unshared = build_data_schedule(forest.lengths, **arguments)
    schedule = build_data_schedule(forest.lengths, forest=forest, **arguments)
    batch = batch_of(Problem.of(forest.lengths, forest=forest, **arguments))
    assert isinstance(batch, ForestBatch)
    groups = _merged(batch.computed(group_of), group_of)
    whole = plan_slots(groups)
    time = batch.time(schedule.microbatch_of, schedule.cp_size_grid)
    alone = unshared.predicted_cost
    return {
        "objective": objective,
        "gain": alone / schedule.predicted_cost,
        "whole_groups": time
        / batch.time(whole.microbatch_of[group_of], whole.cp_sizes)
        * alone
        / schedule.predicted_cost,
        "over_bound": schedule.predicted_cost / schedule.lower_bound,
    }


def section(figures: Mapping[str, Any]) -> str:
    """Markdown of the figures."""
    rows = [
        [
            row["set"],
            f"{row['groups']} on {row['ranks']}",
            str(row["systems"]),
            row["objective"],
            f"{row['gain']:.2f}",
            f"{row['whole_groups']:.2f}",
            f"{row['over_bound']:.3f}",
        ]
        for row in figures["rows"]
    ]
    names = "set | groups, ranks | system prompts | objective | pieces | whole groups | over bound"
    return f"""Groups of {RESPONSES} responses, {figures["lengths"]}; cap {CAP}. Speed over plans that share nothing, of
    plans in pieces and of plans of whole groups, predicted; then time of the plan in pieces over a bound that no plan
    beats. System prompts of {SYSTEM_TOKENS} tokens stand above the groups.

{table(names, rows)}"""
