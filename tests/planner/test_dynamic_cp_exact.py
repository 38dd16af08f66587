"""Plans with dynamic context-parallel sizes against the best ones that a constraint solver finds."""

import pytest

from megatron_balance import CostModel, Limits, Topology, build_data_schedule

CAP = 256


def lengths_of(case):
    """Pseudo-random lengths, most short and one long: the same everywhere."""
    state, lengths = 7919 * (case + 1), []
    for _ in range(9 + case % 3):
        state = state * 48271 % (2**31 - 1)
        lengths.append(16 + state % 240)
    return [*lengths, 300 + 160 * (case % 4)]


def nodes_of(num_leaves, sizes):
    """Groups that may be: `(first leaf, size)`."""
    return [(first, size) for size in sizes for first in range(0, num_leaves - size + 1, size)]


def best_time(schedule, *, rows, seconds=4.0):
    """The least time of any plan: of leaves (`step`, micro-batches free), or of a given number of rows."""
    cp_model = pytest.importorskip("ortools.sat.python.cp_model")
    model = cp_model.CpModel()
    samples = schedule.samples()
    num_leaves, num_samples = samples.num_leaves, samples.num_samples
    nodes = nodes_of(num_leaves, schedule.topology.dynamic_cp_sizes)
    longest = int(samples.costs.sum())
    num_rows = rows or 1
    inside = {}
    for sample in range(num_samples):
        for row in range(num_rows):
            for node, (_, size) in enumerate(nodes):
                if size.bit_length() > samples.least_levels[sample]:
                    inside[sample, row, node] = model.new_bool_var(f"{sample} in row {row} on {node}")
        model.add_exactly_one(here for (s, _, _), here in inside.items() if s == sample)

    def held(row, node, amounts):
        level = nodes[node][1].bit_length() - 1
        return sum(
            int(amounts[level, sample]) * here
            for (sample, of_row, of_node), here in inside.items()
            if (of_row, of_node) == (row, node)
        )

    if rows is None:
        time = model.new_int_var(0, longest, "time")
        for leaf in range(num_leaves):
            above = [node for node, (first, size) in enumerate(nodes) if first <= leaf < first + size]
            model.add(sum(held(0, node, samples.costs) for node in above) <= time)
        model.minimize(time)
    else:
        heights = [model.new_int_var(0, longest, f"height {row}") for row in range(num_rows)]
        for row, height in enumerate(heights):
            runs = [model.new_bool_var(f"row {row} has {node}") for node in range(len(nodes))]
            for leaf in range(num_leaves):
                model.add_at_most_one(
                    run for run, (first, size) in zip(runs, nodes, strict=True) if first <= leaf < first + size
                )
            for node, run in enumerate(runs):
                model.add(held(row, node, samples.tokens) <= CAP * run)
                model.add(held(row, node, samples.costs) <= height)
        for higher, lower in zip(heights, heights[1:], strict=False):
            model.add(higher >= lower)
        model.minimize(sum(heights))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    status = solver.solve(model)
    assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return int(solver.objective_value), status == cp_model.OPTIMAL


def schedule_of(case, *, objective, cp_exchange):
    return build_data_schedule(
        lengths_of(case),
        cost_model=CostModel(linear=1000, quadratic=1, cp_exchange=cp_exchange),
        topology=Topology(2 + case % 2, cp_size=2, dynamic_cp=True),
        limits=Limits(CAP),
        objective=objective,
    ).check()


@pytest.mark.parametrize(("cp_exchange", "most"), [(0, 1.015), (10, 1.02), (80, 1.025)])
def test_the_step_is_near_the_best_plan(cp_exchange, most):
    ratios = []
    for case in range(6):
        schedule = schedule_of(case, objective="step", cp_exchange=cp_exchange)
        best, is_optimal = best_time(schedule, rows=None)
        assert schedule.lower_bound <= best
        if is_optimal:
            assert schedule.predicted_cost >= best
        ratios.append(schedule.predicted_cost / best)
    assert sum(ratios) / len(ratios) <= most


@pytest.mark.parametrize(("cp_exchange", "most"), [(0, 1.03), (80, 1.02)])
def test_rows_are_near_the_best_ones(cp_exchange, most):
    ratios = []
    for case in range(4):
        schedule = schedule_of(case, objective="microbatch", cp_exchange=cp_exchange)
        best, _ = best_time(schedule, rows=schedule.num_microbatches)
        assert schedule.lower_bound <= best
        ratios.append(schedule.predicted_cost / best)
    assert sum(ratios) / len(ratios) <= most
