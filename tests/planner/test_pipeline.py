"""The wavefront against a simulation of 1F1B written the obvious way."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.planner.makespan import mountain_order, pipeline_makespans


def simulate(costs, pp_size):
    """Ends of all passes by their dependencies, in units of a third of a cost per stage."""
    count = len(costs)
    orders = []
    for stage in range(pp_size):
        warm_up = min(pp_size - 1 - stage, count)
        order = [("F", j) for j in range(warm_up)]
        for i in range(count - warm_up):
            order += [("F", warm_up + i), ("B", i)]
        orders.append(order + [("B", i) for i in range(count - warm_up, count)])
    ends, position, free = {}, [0] * pp_size, [0] * pp_size
    while any(position[stage] < 2 * count for stage in range(pp_size)):
        for stage in range(pp_size):
            if position[stage] == 2 * count:
                continue
            kind, index = orders[stage][position[stage]]
            neighbour = stage - 1 if kind == "F" else stage + 1
            if 0 <= neighbour < pp_size:
                if (neighbour, kind, index) not in ends:
                    continue
                free[stage] = max(free[stage], ends[neighbour, kind, index])
            free[stage] += costs[index] * (1 if kind == "F" else 2)
            ends[stage, kind, index] = free[stage]
            position[stage] += 1
    return max(free)


@settings(deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=9), st.integers(2, 6))
def test_the_wavefront_is_one_forward_one_backward(costs, pp_size):
    expected = max(-(-simulate(costs, pp_size) // (3 * pp_size)), max(costs))
    assert pipeline_makespans(np.array([costs], dtype=np.int64), pp_size=pp_size).tolist() == [expected]


def test_equal_micro_batches_take_the_textbook_time():
    # (num_microbatches + pp_size - 1) micro-batches of 1/pp_size of the cost each.
    grid = np.full((2, 8), 400, dtype=np.int64)
    assert pipeline_makespans(grid, pp_size=4).tolist() == [(8 + 3) * 100] * 2


def test_interleaving_divides_the_bubble():
    grid = np.full((1, 8), 400, dtype=np.int64)
    assert pipeline_makespans(grid, pp_size=4, vpp_size=3).tolist() == [(8 + 1) * 100]


def test_one_stage_is_the_sum():
    assert pipeline_makespans(np.array([[3, 4], [0, 5]]), pp_size=1).tolist() == [7, 5]


def test_costs_near_int64_lose_bits_upwards():
    grid = np.array([[2**58, 2**58 + 1, 2**57]], dtype=np.int64)
    exact = -(-simulate(grid[0].tolist(), 8) // 24)
    found = int(pipeline_makespans(grid, pp_size=8)[0])
    assert exact <= found <= exact * (1 + 2**-40)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 99), min_size=5, max_size=5), min_size=1, max_size=4))
def test_a_mountain_rises_and_falls(rows):
    grid = np.array(rows, dtype=np.int64)
    order = mountain_order(grid)
    assert (np.sort(order, axis=1) == np.arange(5)).all()
    for row in np.take_along_axis(grid, order, axis=1).tolist():
        peak = row.index(max(row))
        assert row[: peak + 1] == sorted(row[: peak + 1])
        assert row[peak:] == sorted(row[peak:], reverse=True)


@pytest.mark.parametrize("pp_size", [2, 3, 4])
@settings(max_examples=15, deadline=None)
@given(costs=st.lists(st.integers(1, 60), min_size=2, max_size=6))
def test_a_mountain_is_near_the_best_order(pp_size, costs):
    grid = np.array([costs], dtype=np.int64)
    mountain = np.take_along_axis(grid, mountain_order(grid), axis=1)
    orders = np.array(sorted(set(permutations(costs))), dtype=np.int64)
    best = int(pipeline_makespans(orders, pp_size=pp_size).min())
    assert int(pipeline_makespans(mountain, pp_size=pp_size)[0]) <= 1.5 * best
