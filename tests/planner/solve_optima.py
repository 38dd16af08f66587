"""Finds the best plans of small batches, once: `python tests/planner/solve_optima.py` prints the optima of golden.json.

Dynamic context parallelism by OR-tools' CP-SAT, which proves the optimum; all others by trying all plans. A micro-batch
has a fixed cost, so that more of them stop paying: counts rise until an even share of the work costs more than the best
plan, or there are as many as samples. Names of kinds as arguments solve these only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
from ortools.sat.python import cp_model
from plan_cells import FAMILIES
from plan_judge import Batch, makespan

from megatron_balance import CostModel, Limits, Topology

CAP = 4096
FULLY_SHARDED = {"fully_sharded": True}
FLOPS = {"linear": 1000, "quadratic": 1, "per_microbatch": 64_000}
SHARED_EXPERTS = {"linear": 500, "quadratic": 1, "expert_linear": 500, "per_microbatch": 64_000}
EXCHANGED = {"linear": 1000, "quadratic": 1, "cp_exchange": 800, "per_microbatch": 64_000}
FREE_LAUNCHES = {"linear": 1000, "quadratic": 1, "cp_exchange": 800}
WITH_IMAGES = {"linear": 1000, "quadratic": 1, "image_linear": 500, "per_microbatch": 64_000}


def instances() -> Iterator[dict[str, Any]]:
    """Batches of 6 to 10 samples: what `build_data_schedule` takes, as JSON."""
    for kind, objective, topology, cost_model, num_samples in (
        ("step", "step", {"dp_size": 2}, FLOPS, 10),
        ("step", "step", {"dp_size": 3}, FLOPS, 10),
        ("microbatch", "microbatch", {"dp_size": 2, **FULLY_SHARDED}, FLOPS, 10),
        ("microbatch", "microbatch", {"dp_size": 3, **FULLY_SHARDED}, FLOPS, 10),
        ("experts", "microbatch", {"dp_size": 4, "ep_size": 2}, SHARED_EXPERTS, 10),
        ("images", "microbatch", {"dp_size": 2, **FULLY_SHARDED}, WITH_IMAGES, 8),
        ("pipeline", "pipeline", {"dp_size": 2, "pp_size": 2}, FLOPS, 6),
        ("pipeline", "pipeline", {"dp_size": 2, "pp_size": 3}, FLOPS, 6),
        ("dynamic CP", "step", {"dp_size": 2, "cp_size": 2, "dynamic_cp": True}, FREE_LAUNCHES, 10),
        ("dynamic CP", "microbatch", {"dp_size": 2, "cp_size": 2, "dynamic_cp": True}, EXCHANGED, 7),
    ):
        for seed, family in enumerate(("lognormal", "bimodal", "giant", "pareto")):
            generator = np.random.default_rng([seed, num_samples, topology["dp_size"]])
            cap = CAP // 2 if kind == "dynamic CP" else CAP
            lengths = FAMILIES[family](generator, num_samples, CAP).astype(int).tolist()
            patches = [generator.integers(64, 1500, n).tolist() for n in generator.integers(0, 3, num_samples)]
            yield {
                "kind": kind,
                "objective": objective,
                "topology": topology,
                "cost_model": cost_model,
                "cap": cap,
                "lengths": lengths,
                **({"image_patches": patches} if kind == "images" else {}),
            }


def batch_of(instance: dict[str, Any]) -> Batch:
    """The same as objects."""
    return Batch(
        instance["lengths"],
        CostModel(**instance["cost_model"]),
        Topology(**instance["topology"]),
        Limits(instance["cap"]),
        instance["objective"],
        instance.get("image_patches"),
    )


def solved(build: Callable[[cp_model.CpModel, int], cp_model.LinearExprT], *, rows: int) -> int | None:
    """The optimum that CP-SAT proves for a number of rows; None where there is no plan.

    Raises:
        TimeoutError: it proves none in half a minute.
    """
    model = cp_model.CpModel()
    model.minimize(build(model, rows))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_time_in_seconds = 30
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return None
    if status != cp_model.OPTIMAL:
        raise TimeoutError
    return round(solver.objective_value)


def over_counts(batch: Batch, value: Callable[[int], int | None]) -> int:
    """The least value over all numbers of micro-batches."""
    launch, best = batch.cost_model.per_microbatch, None
    stages = batch.topology.pp_size if batch.is_makespan else 1
    work = sum(batch.own) // batch.topology.num_leaves
    for rows in range(1, len(batch.lengths) + 1):
        if best is not None and (work + rows * launch + (stages - 1) * launch) // stages >= best:
            break
        found = value(rows)
        best = found if best is None or (found is not None and found < best) else best
    assert best is not None
    return best


def bins_of(batch: Batch, samples: Sequence[int]) -> Iterator[list[list[int]]]:
    """The bins of every way to put samples into bins under the cap."""
    cap = batch.limits.max_tokens_per_gpu

    def extend(index: int, bins: list[list[int]], room: list[int]) -> Iterator[list[list[int]]]:
        if index == len(samples):
            yield bins
            return
        sample, tokens = samples[index], batch.tokens[samples[index]]
        for i, left in enumerate(room):
            if left >= tokens:
                changed = [*bins[:i], [*bins[i], sample], *bins[i + 1 :]]
                yield from extend(index + 1, changed, [*room[:i], left - tokens, *room[i + 1 :]])
        yield from extend(index + 1, [*bins, [sample]], [*room, cap - tokens])

    return extend(0, [], [])


def best_rows(batch: Batch) -> int:
    """The least time of all plans whose rows add up: bins sorted by cost and cut into rows are a group's best rows."""
    span, launch, num_samples = batch.span, batch.cost_model.per_microbatch, len(batch.lengths)
    groups = batch.topology.dp_size // span
    of_subset: list[dict[int, int]] = []
    for subset in range(1 << num_samples):
        samples = [i for i in range(num_samples) if subset >> i & 1]
        work = {0: 0} if not samples else {}
        # One group has all samples.
        for bins in bins_of(batch, samples) if samples and (groups > 1 or len(samples) == num_samples) else ():
            costs = [sum(batch.own[i] for i in ids) for ids in bins]
            rows = -(-len(costs) // span)
            # Shares are whole: expert costs are a multiple of the ranks.
            time = sum(sorted(costs, reverse=True)[::span]) + sum(batch.shared[i] for i in samples) // span
            work[rows] = min(time, work.get(rows, time))
        of_subset.append(work)
    best = None
    for groups_of in product(range(groups), repeat=num_samples - 1):
        subsets = [1, *[0] * (groups - 1)]
        for i, group in enumerate(groups_of, 1):
            subsets[group] |= 1 << i
        for most in range(1, num_samples + 1):
            fitting = [[work for rows, work in of_subset[s].items() if rows <= most] for s in subsets]
            if all(fitting):
                time = max(map(min, fitting)) + most * launch
                best = time if best is None else min(best, time)
    assert best is not None
    return best


def best_pairs(batch: Batch) -> int:
    """The least time of two ranks that meet twice in a row, after the encoder and after the language model."""
    launch = batch.cost_model.per_microbatch

    def paired(bins: list[tuple[int, int]]) -> int:
        if not bins:
            return 0
        (one, *rest) = bins
        choices = [((0, 0), rest)] if len(bins) % 2 else []
        choices += [(other, [*rest[:i], *rest[i + 1 :]]) for i, other in enumerate(rest)]
        return min(max(one[0], two[0]) + max(one[1], two[1]) + launch + paired(left) for two, left in choices)

    return min(
        paired([(sum(batch.images[i] for i in ids), sum(batch.own[i] - batch.images[i] for i in ids)) for ids in bins])
        for bins in bins_of(batch, range(len(batch.lengths)))
    )


def any_size(batch: Batch) -> Callable[[cp_model.CpModel, int], cp_model.LinearExprT]:
    """The time of groups of leaves: `step` of the fullest leaf, else of rows in which all leaves meet."""
    leaves, sizes, cap = batch.topology.num_leaves, batch.topology.dynamic_cp_sizes, batch.limits.max_tokens_per_gpu
    nodes = [(first, size) for size in sizes for first in range(0, leaves - size + 1, size)]
    samples, launch = range(len(batch.lengths)), batch.cost_model.per_microbatch

    def cost(i: int, size: int) -> int:
        return -(-batch.cost_on(batch.lengths[i], size) // size)

    def tokens(i: int, size: int) -> int:
        return batch.padded(batch.lengths[i], size) // size

    def build(model: cp_model.CpModel, rows: int) -> cp_model.LinearExprT:
        held = {
            (i, row, node): model.new_bool_var("")
            for i, row, node in product(samples, range(rows), nodes)
            if tokens(i, node[1]) <= cap
        }
        for i in samples:
            model.add_exactly_one(here for (sample, _, _), here in held.items() if sample == i)
        runs = {key: model.new_bool_var("") for key in product(range(rows), nodes)}
        total = sum(cost(i, 1) for i in samples) + rows * launch

        def amount(of: Callable[[int, int], int], row: int, node: tuple[int, int]) -> cp_model.LinearExprT:
            return sum(of(i, node[1]) * held[i, row, node] for i in samples if (i, row, node) in held)

        def above(leaf: int) -> list[tuple[int, int]]:
            return [(first, size) for first, size in nodes if first <= leaf < first + size]

        for row in range(rows):
            for node in nodes if batch.objective == "microbatch" else ():
                model.add(amount(tokens, row, node) <= cap * runs[row, node])
            for leaf in range(leaves) if batch.objective == "microbatch" else ():
                model.add_at_most_one(runs[row, node] for node in above(leaf))
        if batch.objective == "step":
            longest = model.new_int_var(0, total, "")
            for leaf in range(leaves):
                model.add(sum(amount(cost, 0, node) for node in above(leaf)) <= longest)
            return longest
        heights = [model.new_int_var(0, total, "") for _ in range(rows)]
        for row, node in runs:
            model.add(amount(cost, row, node) <= heights[row])
        for higher, lower in zip(heights, heights[1:], strict=False):
            model.add(higher >= lower)
        return sum(heights) + rows * launch

    return build


def best_pipeline(batch: Batch, rows: int) -> int | None:
    """The least makespan of two ranks, over all subsets of the samples and all orders of their micro-batches."""
    cap, launch, everything = batch.limits.max_tokens_per_gpu, batch.cost_model.per_microbatch, len(batch.lengths)
    of_subset: dict[int, int] = {}
    for slots in product(range(-1, rows), repeat=everything):
        tokens, costs, subset = [0] * rows, [launch] * rows, 0
        for i, slot in enumerate(slots):
            if slot >= 0:
                tokens[slot] += batch.tokens[i]
                costs[slot] += batch.own[i]
                subset |= 1 << i
        if max(tokens) <= cap:
            best = of_subset.get(subset)
            if best is None or sum(costs) // batch.topology.pp_size < best:
                time = makespan(costs, stages=batch.topology.pp_size)
                of_subset[subset] = time if best is None else min(best, time)
    whole = (1 << everything) - 1
    both = ((time, of_subset.get(whole ^ subset)) for subset, time in of_subset.items())
    return min((max(time, other) for time, other in both if other is not None), default=None)


def optimum(instance: dict[str, Any]) -> int | None:
    """The least predicted cost of any plan; None where none is proved in time."""
    batch = batch_of(instance)
    try:
        if instance["kind"] == "pipeline":
            return over_counts(batch, lambda rows: best_pipeline(batch, rows))
        if instance["kind"] == "images":
            return best_pairs(batch)
        if instance["kind"] != "dynamic CP":
            return best_rows(batch)
        if instance["objective"] == "step":
            # Micro-batches cost nothing here, and a sample may be one by itself.
            return solved(any_size(batch), rows=1)
        return over_counts(batch, lambda rows: solved(any_size(batch), rows=rows))
    except TimeoutError:
        return None


if __name__ == "__main__":
    wanted = sys.argv[1:]
    for instance in instances():
        if not wanted or instance["kind"] in wanted:
            best = optimum(instance)
            if best is not None:
                print(json.dumps({**instance, "optimum": best}), flush=True)
