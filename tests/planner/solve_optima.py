"""Finds the best plans of small batches, once: `python tests/planner/solve_optima.py` prints the optima of golden.json.

OR-tools' CP-SAT proves them, one number of micro-batches after the other. A micro-batch has a fixed cost, so that more
of them stop paying: counts rise until an even share of the work costs more than the best plan, or there are as many as
samples. Names of kinds as arguments solve these only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

import numpy as np
from ortools.sat.python import cp_model
from plan_cells import FAMILIES
from plan_judge import Batch

from megatron_balance import CostModel, Limits, Topology

CAP = 4096
FLOPS = {"linear": 1000, "quadratic": 1, "per_microbatch": 64_000}
SHARDED = {"fully_sharded": True}
DYNAMIC = {"dp_size": 2, "cp_size": 2, "dynamic_cp": True}
EXCHANGED = {"linear": 1000, "quadratic": 1, "cp_exchange": 800}
KINDS: tuple[tuple[str, str, dict[str, Any], dict[str, int], int], ...] = (
    ("step", "step", {"dp_size": 2}, FLOPS, 10),
    ("step", "step", {"dp_size": 3}, FLOPS, 10),
    ("microbatch", "microbatch", {"dp_size": 2, **SHARDED}, FLOPS, 10),
    ("microbatch", "microbatch", {"dp_size": 3, **SHARDED}, FLOPS, 10),
    ("experts", "microbatch", {"dp_size": 4, "ep_size": 2}, {**FLOPS, "linear": 500, "expert_linear": 500}, 10),
    ("images", "microbatch", {"dp_size": 2, **SHARDED}, {**FLOPS, "image_linear": 500}, 8),
    ("pipeline", "pipeline", {"dp_size": 2, "pp_size": 2}, FLOPS, 6),
    ("pipeline", "pipeline", {"dp_size": 2, "pp_size": 3}, FLOPS, 6),
    ("dynamic CP", "step", DYNAMIC, EXCHANGED, 10),
    ("dynamic CP", "microbatch", DYNAMIC, {**EXCHANGED, "per_microbatch": 64_000}, 7),
)


def instances() -> Iterator[dict[str, Any]]:
    """Batches of 6 to 10 samples: what `build_data_schedule` takes, as JSON."""
    for kind, objective, topology, cost_model, num_samples in KINDS:
        for seed, family in enumerate(("lognormal", "bimodal", "giant", "pareto")):
            generator = np.random.default_rng([seed, num_samples, topology["dp_size"]])
            lengths = FAMILIES[family](generator, num_samples, CAP).astype(int).tolist()
            patches = [generator.integers(64, 1500, n).tolist() for n in generator.integers(0, 3, num_samples)]
            yield {
                "kind": kind,
                "objective": objective,
                "topology": topology,
                "cost_model": cost_model,
                "cap": CAP // 2 if kind == "dynamic CP" else CAP,
                "lengths": lengths,
                **({"image_patches": patches} if kind == "images" else {}),
            }


def pipeline_end(model: cp_model.CpModel, heights: list[Any], stages: int, longest: int) -> Any:
    """End of one-forward-one-backward of slots that take a height forward and two backward on each stage."""
    ends = {key: model.new_int_var(0, longest, "") for key in product(range(stages), range(len(heights)), (0, 1))}
    last = model.new_int_var(0, longest, "")
    for stage in range(stages):
        ahead = min(stages - 1 - stage, len(heights))
        order = [(slot, 0) for slot in range(ahead)]
        for slot in range(len(heights)):
            order += [(slot + ahead, 0)] * (slot + ahead < len(heights)) + [(slot, 1)]
        for before, (slot, backward) in pairwise([None, *order]):
            neighbour = (stage + 1 if backward else stage - 1, slot, backward)
            for start in (ends[(stage, *before)] if before else 0, ends.get(neighbour, 0)):
                model.add(ends[stage, slot, backward] >= start + (1 + backward) * heights[slot])
        model.add(ends[stage, order[-1][0], 1] <= last)
    return last


def solved(batch: Batch, rows: int, best: int | None) -> int | None:
    """The least time of plans of so many micro-batches; None where none is below `best`.

    Raises:
        TimeoutError: it is not proved in a minute.
    """
    model, topology, launch = cp_model.CpModel(), batch.topology, batch.cost_model.per_microbatch
    leaves, samples, cap = topology.num_leaves, range(len(batch.lengths)), batch.limits.max_tokens_per_gpu
    sizes = topology.dynamic_cp_sizes if topology.dynamic_cp else (1,)
    nodes = [(first, size) for size in sizes for first in range(0, leaves - size + 1, size)]
    span = 1 if batch.span == 1 else leaves // (topology.dp_size // batch.span)
    held = {
        (i, row, node): model.new_bool_var("")
        for i, row, node in product(samples, range(rows), nodes)
        if batch.padded(batch.lengths[i], node[1]) <= cap * node[1]
    }
    runs = {key: model.new_bool_var("") for key in product(range(rows), nodes)}
    for i in samples:
        model.add_exactly_one(here for (sample, _, _), here in held.items() if sample == i)
    for row, node in runs if launch else ():  # without fixed costs a sample may be a micro-batch by itself
        tokens = {i: batch.padded(batch.lengths[i], node[1]) // node[1] for i in samples if (i, row, node) in held}
        model.add(sum(held[i, row, node] * tokens[i] for i in tokens) <= cap * runs[row, node])
    own = {(i, size): -(-(batch.cost_on(batch.lengths[i], size)) // size) for i in samples for size in sizes}
    longest = sum(own[i, 1] + batch.images[i] + batch.shared[i] for i in samples) + rows * launch
    time = model.new_int_var(0, longest if best is None else best - 1, "")
    for first in range(0, leaves, span):
        group, heights = range(first, first + span), []
        for row in range(rows):
            encoder, rest = (model.new_int_var(0, longest, "") for _ in range(2))
            here = [key for key in held if key[1] == row]
            for leaf in group:
                above = [(i, row, (at, size)) for i, _, (at, size) in here if at <= leaf < at + size]
                model.add_at_most_one(runs[row, node] for node in nodes if node[0] <= leaf < sum(node))
                model.add(sum(held[key] * batch.images[key[0]] for key in above) <= encoder)
                model.add(sum(held[key] * own[key[0], key[2][1]] for key in above) <= rest)
            # Shares are whole: expert costs are a multiple of the ranks.
            share = sum(held[key] * (batch.shared[key[0]] // span) for key in here if key[2][0] in group)
            heights.append(encoder + rest + share + launch)
        if batch.is_makespan:
            model.add(3 * topology.pp_size * time >= pipeline_end(model, heights, topology.pp_size, 9 * longest))
            for height in heights:
                model.add(time >= height)
        else:
            model.add(time >= sum(heights))
        if first == 0 and not batch.is_makespan and launch:  # rows of one time are alike
            for higher, lower in pairwise(heights):
                model.add(higher >= lower)
    model.minimize(time)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_time_in_seconds = 60
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.INFEASIBLE):
        raise TimeoutError
    return round(solver.objective_value) if status == cp_model.OPTIMAL else None


def optimum(instance: dict[str, Any]) -> int:
    """The least predicted cost of any plan."""
    batch = Batch(
        instance["lengths"],
        CostModel(**instance["cost_model"]),
        Topology(**instance["topology"]),
        Limits(instance["cap"]),
        instance["objective"],
        instance.get("image_patches"),
    )
    launch, best = batch.cost_model.per_microbatch, None
    stages = batch.topology.pp_size
    work = sum(batch.own) // batch.topology.num_leaves
    for rows in range(1, len(batch.lengths) + 1 if launch else 2):
        if best is not None and (work + (rows + stages - 1) * launch) // stages >= best:
            break
        best = solved(batch, rows, best) or best
    assert best is not None
    return best


if __name__ == "__main__":
    for instance in instances():
        if not sys.argv[1:] or instance["kind"] in sys.argv[1:]:
            print(json.dumps({**instance, "optimum": optimum(instance)}), flush=True)
