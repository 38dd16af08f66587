"""Plans of samples that share prompts: over their bound, over an annealed reference, and beside whole groups.

A reference is the best of simulated annealing from the plan: samples move between micro-batches, half of them off the
slowest rank or slot. Whole groups are the same planner with a group as a sample.
"""

from __future__ import annotations

import argparse
import math
import random
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
BAR = 1.05
"""The largest distance from a reference."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--moves", type=int, default=200_000, metavar="N", help="of annealing, for each plan")
    parser.add_argument("--sets", nargs="+", default=SETS, metavar="NAME", help="sets of lengths")
    add_length_options(parser)


def measure(args: argparse.Namespace) -> Measured:
    """Plans rollouts of each set, without, with one and with four system prompts above the groups."""
    folder, rows, problems = lengths_folder(args), list[dict[str, Any]](), list[str]()
    for name, (groups, ranks) in product(args.sets, SIZES):
        for systems, objective in product((0, 1, 4), ("step", "microbatch")):
            forest, group_of = _forest(name, folder, groups=groups, systems=systems)
            row = _row(forest, group_of, ranks=ranks, objective=objective, moves=args.moves)
            rows.append({"set": name, "groups": groups, "ranks": ranks, "systems": systems, **row})
            sys.stderr.write(f"{rows[-1]}\n")
            if row["over_reference"] > BAR:
                problems.append(f"{name}, {groups} groups, {systems} system prompts, {objective}: {row}")
    return Measured({"lengths": lengths_said(folder), "moves": args.moves, "rows": rows}, raw=rows, problems=problems)


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


def _row(forest: Forest, group_of: Any, *, ranks: int, objective: str, moves: int) -> dict[str, Any]:
    arguments: Any = {"cost_model": COST, "topology": Topology(ranks), "limits": Limits(CAP), "objective": objective}
    unshared = build_data_schedule(forest.lengths, **arguments)
    schedule = build_data_schedule(forest.lengths, forest=forest, **arguments)
    batch = batch_of(Problem.of(forest.lengths, forest=forest, **arguments))
    assert isinstance(batch, ForestBatch)
    groups = _merged(batch.computed(group_of), group_of, int(group_of.max()) + 1)
    whole = plan_slots(groups)
    time = batch.time(schedule.microbatch_of, schedule.cp_size_grid)
    least = _annealed(batch, schedule.microbatch_of, slots=schedule.num_microbatches, ranks=ranks, moves=moves)
    alone = unshared.predicted_cost
    return {
        "objective": objective,
        "gain": alone / schedule.predicted_cost,
        "whole_groups": time
        / batch.time(whole.microbatch_of[group_of], whole.cp_sizes)
        * alone
        / schedule.predicted_cost,
        "over_bound": schedule.predicted_cost / schedule.lower_bound,
        "over_reference": time / min(least, time),
    }


def _annealed(batch: ForestBatch, microbatch_of: Any, *, slots: int, ranks: int, moves: int) -> int:
    """The least time that was found."""
    draw, nodes = random.Random(0), batch.nodes
    costs, tokens = (nodes.costs.sum(axis=0) + nodes.expert_cost).tolist(), nodes.weights.tolist()
    paths = [[node for node in path if node >= 0] for path in batch.forest.paths.T.tolist()]
    place: list[int] = microbatch_of.tolist()
    users = [dict[int, int]() for _ in range(ranks * slots)]
    grid, held = [batch.ends.per_microbatch] * len(users), [0] * len(users)
    members = [list[int]() for _ in users]

    def put(sample: int, to: int, sign: int) -> None:
        count = users[to]
        for node in paths[sample]:
            before = count.get(node, 0)
            count[node] = before + sign
            if before + min(sign, 0) == 0:
                grid[to] += sign * costs[node]
                held[to] += sign * tokens[node]
        (members[to].append if sign > 0 else members[to].remove)(sample)
        place[sample] = to

    for sample, to in enumerate(place):
        put(sample, to, 1)
    meets = batch.waiting.sync_size > 1
    # A step ends with its slowest rank; where ranks meet, a slot ends with its slowest micro-batch.
    values = [0] * (slots if meets else ranks)

    def energy(*changed: int) -> tuple[int, float]:
        """The time, and with it a little of the work of all, once these micro-batches have changed."""
        for index in changed:
            if meets:
                values[index % slots] = max(grid[index % slots :: slots])
            else:
                values[index // slots] = sum(grid[index // slots * slots :][:slots])
        time = sum(values) if meets else max(values)
        return time, time + 0.02 * sum(grid) / ranks

    least, now = energy(*range(len(grid)))
    heat = now / 500
    for move in range(moves):
        temperature = heat * (1 - move / moves) ** 2 + 1e-9
        slowest = values.index(max(values))
        if meets:
            busiest = max(range(slowest, len(grid), slots), key=grid.__getitem__)
        else:
            busiest = slowest * slots + draw.randrange(slots)
        pool = members[busiest] if draw.random() < 0.5 else ()
        sample = draw.choice(pool) if pool else draw.randrange(len(place))
        other = draw.choice(members[draw.randrange(len(grid))] or [sample])
        start, to = place[sample], place[other]
        if start == to:
            continue
        changes = [(sample, start, to), (other, to, start)][: 1 + (draw.random() < 0.4)]
        for index, source, target in changes:
            put(index, source, -1)
            put(index, target, 1)
        time, after = energy(start, to)
        fits = all(held[index] <= batch.alone.cap or len(members[index]) == 1 for index in (start, to))
        if fits and (after <= now or draw.random() < math.exp((now - after) / temperature)):
            now, least = after, min(least, time)
            continue
        for index, source, target in reversed(changes):
            put(index, target, -1)
            put(index, source, 1)
        energy(start, to)
    return least


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
            f"{row['over_reference']:.3f}",
        ]
        for row in figures["rows"]
    ]
    names = "set | groups, ranks | system prompts | objective | pieces | whole groups | over bound | over annealed"
    return f"""Groups of {RESPONSES} responses, {figures["lengths"]}; cap {CAP}. Speed over plans that share nothing, of
    plans in pieces and of plans of whole groups, predicted; then time of the plan in pieces over a bound that no plan
    beats, and over the best of {figures["moves"]:,} moves of simulated annealing from it. System prompts of
    {SYSTEM_TOKENS} tokens stand above the groups.

{table(names, rows)}"""
