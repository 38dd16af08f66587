"""Every partition algorithm: one test runs all, then what each promises by itself."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.planner.build import build_data_schedule
from megatron_balance.planner.partition import (
    ALGORITHMS,
    first_fit,
    greedy,
    karmarkar_karp,
    karmarkar_karp_rows,
    level_packing,
    peel_rows,
    refine,
)
from megatron_balance.planner.partition.batched_packing import batched_packing
from megatron_balance.planner.partition.dense_fill import dense_fill
from megatron_balance.topology import Limits, Topology

COSTS = st.lists(st.integers(0, 200), max_size=40)


def level_parts(costs, *, num_parts):
    array = np.array(costs, dtype=np.int64)
    bin_of = level_packing(
        array,
        weights=np.ones_like(array),
        capacity=max(array.size, 1),
        target_heights=[0],
        num_groups=1,
        bins_per_row=num_parts,
    )
    return [np.flatnonzero(bin_of == part).tolist() for part in range(num_parts)]


PARTITIONS = {
    "karmarkar_karp": karmarkar_karp,
    "karmarkar_karp equal": lambda costs, *, num_parts: karmarkar_karp(costs, num_parts=num_parts, equal_size=True),
    "greedy": greedy,
    "greedy capped": lambda costs, *, num_parts: greedy(
        costs, num_parts=num_parts, max_count=-(-len(costs) // num_parts)
    ),
    "level_packing": level_parts,
}


def sums(costs, parts):
    return [sum(int(costs[item]) for item in part) for part in parts]


@pytest.mark.parametrize("name", PARTITIONS)
@settings(deadline=None)
@given(costs=COSTS, num_parts=st.integers(1, 9))
def test_every_item_is_in_one_part_and_ascends(name, costs, num_parts):
    parts = PARTITIONS[name](costs, num_parts=num_parts)
    assert len(parts) == num_parts
    assert sorted(item for part in parts for item in part) == list(range(len(costs)))
    assert all(part == sorted(part) for part in parts)
    assert parts == PARTITIONS[name](np.array(costs, dtype=np.int64), num_parts=num_parts)


@pytest.mark.parametrize("name", ["karmarkar_karp", "greedy", "level_packing"])
@settings(deadline=None)
@given(costs=st.lists(st.integers(0, 50), max_size=7), num_parts=st.integers(1, 3))
def test_free_counts_stay_within_grahams_bound_of_brute_force(name, costs, num_parts):
    best = min(
        max(sum(c for c, p in zip(costs, choice, strict=True) if p == part) for part in range(num_parts))
        for choice in product(range(num_parts), repeat=len(costs))
    )
    assert 3 * max(sums(costs, PARTITIONS[name](costs, num_parts=num_parts))) <= 4 * best


@settings(deadline=None)
@given(costs=COSTS, num_parts=st.integers(1, 9))
def test_equal_size_counts_differ_by_one_at_most(costs, num_parts):
    counts = [len(part) for part in karmarkar_karp(costs, num_parts=num_parts, equal_size=True)]
    assert max(counts) - min(counts) <= 1


def test_karmarkar_karp_on_the_textbook_example():
    # The differencing method leaves a difference of 2 on 8 7 6 5 4; the best is 0.
    parts = karmarkar_karp([8, 7, 6, 5, 4], num_parts=2)
    assert sorted(sums([8, 7, 6, 5, 4], parts)) == [14, 16]


def test_karmarkar_karp_beats_greedy_on_many_random_items():
    rng = np.random.default_rng(0)
    spreads = {"karmarkar_karp": 0, "greedy": 0}
    for _ in range(20):
        costs = rng.integers(1, 10**9, 64)
        for name in spreads:
            totals = sums(costs, PARTITIONS[name](costs, num_parts=4))
            spreads[name] += max(totals) - min(totals)
    assert spreads["karmarkar_karp"] < spreads["greedy"] / 2


@settings(deadline=None)
@given(st.integers(1, 3), st.integers(1, 6), st.integers(1, 6), st.randoms(use_true_random=False))
def test_rows_give_every_part_one_item_of_each(num_problems, num_rows, num_parts, random):
    costs = [random.randrange(100) for _ in range(num_problems * num_rows * num_parts)]
    problems = -np.sort(-np.array(costs).reshape(num_problems, num_rows, num_parts), axis=2)
    for rows, part_of in zip(problems, karmarkar_karp_rows(problems), strict=True):
        assert (np.sort(part_of, axis=1) == np.arange(num_parts)).all()
        totals = np.array([rows[part_of == part].sum() for part in range(num_parts)])
        straight = rows.sum(axis=0)
        assert totals.max() - totals.min() <= straight.max() - straight.min()
        # Rows are joined as the equal-size form joins them, which sorts all items into its rows.
        if num_rows == 1 or (rows[:-1, -1] > rows[1:, 0]).all():
            parts = karmarkar_karp(rows.reshape(-1), num_parts=num_parts, equal_size=True)
            assert sorted(sums(rows.reshape(-1), parts)) == sorted(totals.tolist())


def test_greedy_refuses_a_count_that_cannot_hold_all():
    with pytest.raises(BalanceError, match="max_count is 1: 2 parts cannot hold 3 items"):
        greedy([1, 2, 3], num_parts=2, max_count=1)


@pytest.mark.parametrize("partition", [greedy, karmarkar_karp])
def test_no_parts_is_an_error(partition):
    with pytest.raises(BalanceError, match="num_parts is 0"):
        partition([1], num_parts=0)


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), max_size=40), st.integers(1, 20))
def test_first_fit_is_the_plain_loop(weights, capacity):
    bins, rooms = [], []
    for item, weight in enumerate(weights):
        index = next((i for i, room in enumerate(rooms) if weight <= room), len(bins))
        if weight > capacity or index == len(bins):
            index = len(bins)
            bins.append([])
            rooms.append(capacity)
        bins[index].append(item)
        rooms[index] = -1 if weight > capacity else rooms[index] - weight
    assert first_fit(weights, capacity=capacity) == bins


def test_first_fit_decreasing_takes_the_heaviest_first():
    assert first_fit([2, 3, 5, 6], capacity=8, decreasing=True) == [[0, 3], [1, 2]]


def test_first_fit_refuses_no_capacity():
    with pytest.raises(BalanceError, match="capacity is 0"):
        first_fit([1], capacity=0)


WEIGHTS = st.lists(st.integers(0, 14), min_size=1, max_size=40)


@settings(deadline=None)
@given(WEIGHTS, st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))
def test_level_packing_keeps_the_capacity_or_gives_up(weights, num_groups, num_rows, bins_per_row):
    array = np.array(weights, dtype=np.int64)
    bin_of = level_packing(
        array**2,
        weights=array,
        capacity=10,
        target_heights=[40] * num_rows,
        num_groups=num_groups,
        bins_per_row=bins_per_row,
    )
    num_bins = num_groups * num_rows * bins_per_row
    if bin_of is None:
        # A bin for each item is always enough.
        assert num_bins < len(weights)
        return
    assert bin_of.min() >= 0
    assert bin_of.max() < num_bins
    for index in range(num_bins):
        held = array[bin_of == index]
        assert held.size < 2 or held.sum() <= 10


def test_level_packing_fills_a_row_that_is_high_anyway():
    # One item of 90 makes its row high. Level targets put small items beside it, not into the other row.
    costs = np.array([90, 30, 30, 30, 30], dtype=np.int64)
    bin_of = level_packing(
        costs, weights=np.ones(5, dtype=np.int64), capacity=4, target_heights=[90, 15], num_groups=1, bins_per_row=2
    )
    assert bin_of is not None
    heights = [int(costs[bin_of == index].sum()) for index in range(4)]
    assert heights == [90, 90, 30, 0]


def test_level_packing_returns_to_bins_that_waited():
    # Item 2 finds bin 1 cheapest and too full; item 3 is light enough for it again.
    bin_of = level_packing(
        np.array([11, 10, 5, 1]),
        weights=np.array([4, 8, 3, 2]),
        capacity=10,
        target_heights=[0],
        num_groups=1,
        bins_per_row=2,
    )
    assert bin_of is not None
    assert bin_of.tolist() == [0, 1, 0, 1]


@st.composite
def packings(draw):
    """A packing of small items into many bins, with the capacity its fullest bin asks for."""
    num_parts, bins_per_part = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    num_bins = num_parts * bins_per_part
    size = draw(st.integers(0, 24))
    weights = np.array(draw(st.lists(st.integers(0, 9), min_size=size, max_size=size)), dtype=np.int64)
    placed = st.lists(st.integers(0, num_bins - 1), min_size=size, max_size=size)
    bin_of = np.array(draw(placed), dtype=np.int64)
    used = np.bincount(bin_of, weights=weights, minlength=num_bins).astype(np.int64)
    return weights, bin_of, num_parts, bins_per_part, max(int(used.max()), 1)


@settings(deadline=None)
@given(packings(), st.integers(1, 3), st.booleans())
def test_refining_keeps_the_packing_valid_and_never_loses(packing, bins_per_row, has_shared):
    weights, bin_of, num_groups, num_rows, capacity = packing
    costs, shared = weights * (weights + 3), 5 * weights * has_shared
    # Bins of a row are as many more bins, empty at first.
    bins_per_group = num_rows * bins_per_row
    bin_of = bin_of // num_rows * bins_per_group + bin_of % num_rows
    refined = refine(
        costs,
        weights=weights,
        capacity=capacity,
        bin_of=bin_of,
        num_groups=num_groups,
        bins_per_group=bins_per_group,
        bins_per_row=bins_per_row,
        shared=shared,
    )
    check_refined(weights, capacity, bin_of, refined, num_groups * bins_per_group)

    def slowest(bins):
        times = []
        for group in range(num_groups):
            ids = range(group * bins_per_group, (group + 1) * bins_per_group)
            heights = sorted((int(costs[bins == index].sum()) for index in ids), reverse=True)
            own = shared[bins // bins_per_group == group]
            times.append(bins_per_row * sum(heights[::bins_per_row]) + int(own.sum()))
        return max(times)

    assert slowest(refined) <= slowest(bin_of)


def check_refined(weights, capacity, before, after, num_bins):
    used = np.bincount(after, weights=weights, minlength=num_bins)
    assert (used <= capacity).all()
    was_filled = np.bincount(before, minlength=num_bins) > 0
    assert (np.bincount(after, minlength=num_bins)[was_filled] > 0).all()


def test_refining_finds_the_swap_that_greedy_misses():
    costs = np.array([8, 7, 6, 5, 4], dtype=np.int64)
    refined = refine(
        costs, weights=costs, capacity=30, bin_of=np.array([0, 0, 0, 1, 1]), num_groups=2, bins_per_group=1
    )
    assert sorted(int(costs[refined == part].sum()) for part in (0, 1)) == [15, 15]


def test_refining_leaves_over_long_items_alone():
    costs = np.array([50, 1, 1], dtype=np.int64)
    bin_of = np.array([0, 1, 1])
    refined = refine(costs, weights=np.array([11, 1, 1]), capacity=10, bin_of=bin_of, num_groups=2, bins_per_group=1)
    assert refined.tolist() == [0, 1, 1]


def test_every_name_is_an_algorithm_that_is_used():
    # What no rank's packing knows would be planned by level packing under another name.
    lengths = np.arange(1, 162) * 7919 % 1021 + 1
    plans = [
        build_data_schedule(
            lengths,
            cost_model=CostModel(linear=900, quadratic=1),
            topology=Topology(4),
            limits=Limits(3000),
            algorithm=name,
        ).check()
        for name in ALGORITHMS
    ]
    assert len({plan.digest() for plan in plans}) == len(ALGORITHMS)


@pytest.mark.parametrize("num_groups", [1, 3])
@settings(deadline=None)
@given(weights=st.lists(st.integers(0, 40), min_size=1, max_size=60), capacity=st.integers(20, 200))
def test_batches_are_the_plain_loop(num_groups, weights, capacity):
    # Sorted, and a heavier item costs more, as lengths do; the loop below is the rule itself.
    weights = np.array(sorted(weights, reverse=True), dtype=np.int64)
    costs, heights = weights * weights + 1, [900, 500, 0]
    slack, room, loads = [list(heights) for _ in range(num_groups)], [[capacity] * 3 for _ in range(num_groups)], {}
    expected = []
    for cost, weight in zip(costs.tolist(), weights.tolist(), strict=True):
        need = min(weight, capacity)
        fitting = [group for group in range(num_groups) if max(room[group]) >= need]
        if not fitting:
            expected = None
            break
        group = min(fitting, key=lambda group: (loads.get(group, 0), group))
        index = max((i for i in range(3) if room[group][i] >= need), key=lambda i: (slack[group][i], -i))
        slack[group][index] -= cost
        room[group][index] = -1 if weight > capacity else room[group][index] - weight
        loads[group] = loads.get(group, 0) + cost
        expected.append(group * 3 + index)
    found = batched_packing(
        costs,
        weights=weights,
        group_costs=costs,
        capacity=capacity,
        slack=np.tile(np.array(heights, dtype=np.int64), (num_groups, 1)),
        loads=np.zeros(num_groups, dtype=np.int64),
    )
    assert (None if found is None else found.tolist()) == expected


def test_refining_swaps_samples_between_groups():
    # Rows of two bins: group 0 takes 9 + 2 and can do no better by itself, group 1 takes 4 + 1.
    costs = np.array([9, 2, 2, 2, 4, 4, 1, 1], dtype=np.int64)
    bin_of = np.arange(8)
    one = {"weights": np.ones_like(costs), "capacity": 1, "bin_of": bin_of}
    refined = refine(costs, num_groups=2, bins_per_group=4, bins_per_row=2, **one)
    times = [sum(sorted(costs[refined // 4 == group].tolist(), reverse=True)[::2]) for group in (0, 1)]
    assert max(times) == 10


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=40),
    st.lists(st.tuples(st.integers(0, 60), st.integers(-1, 60)), min_size=1, max_size=6),
)
def test_dense_fill_keeps_slack_and_room_and_leaves_nothing_that_fits(costs, bins):
    costs = np.array(sorted(costs, reverse=True), dtype=np.int64)
    slack, room = np.array(bins, dtype=np.int64).T
    found = dense_fill(costs, weights=costs, slack=slack, room=room)
    for index in range(slack.size):
        held = int(costs[found == index].sum())
        assert held <= slack[index]
        assert held <= room[index] or not (found == index).any()
        left = costs[found < 0]
        assert not ((left <= slack[index] - held) & (left <= room[index] - held)).any()


def test_dense_fill_gives_each_bin_the_costliest_that_fits():
    costs = np.array([9, 8, 5, 4, 3, 1], dtype=np.int64)
    found = dense_fill(costs, weights=costs, slack=np.array([9, 9]), room=np.array([9, 9]))
    assert found.tolist() == [0, 1, -1, -1, -1, 1]


def test_peeling_packs_rows_that_a_large_item_makes_high():
    costs = np.array([50, 6, 6, 6, 6, 6, 6, 6], dtype=np.int64)
    options = {"weights": costs, "capacity": 60, "num_rows": 3, "bins_per_row": 2}
    bin_of, num_high = peel_rows(costs, shared=np.zeros_like(costs), limit=None, **options)
    assert num_high == 1
    # Beside the 50 there is room for seven sixes and a bit.
    assert bin_of.tolist() == [0, 1, 1, 1, 1, 1, 1, 1]


def test_peeling_gives_back_what_a_row_has_no_time_for():
    costs = np.array([50, 6, 6, 6, 6, 6, 6, 6], dtype=np.int64)
    options = {"weights": costs, "capacity": 60, "num_rows": 3, "bins_per_row": 2}
    # A row of two bins within 58 beside its height of 50: shared cost of 16.
    bin_of, _ = peel_rows(costs, shared=np.full_like(costs, 4), limit=58, **options)
    assert bin_of.tolist() == [0, 1, 1, 1, -1, -1, -1, -1]
    bin_of, _ = peel_rows(costs, shared=np.full_like(costs, 4), limit=0, **options)
    assert bin_of.tolist() == [0, -1, -1, -1, -1, -1, -1, -1]


def test_peeling_leaves_even_items_to_level_packing():
    costs = np.full(40, 7, dtype=np.int64)
    bin_of, num_high = peel_rows(
        costs, shared=costs, weights=costs, capacity=70, num_rows=4, bins_per_row=2, limit=None
    )
    assert num_high == 0
    assert (bin_of == -1).all()


def test_nothing_joins_an_over_long_item():
    costs = np.array([99, 1, 0], dtype=np.int64)
    weights = np.array([11, 1, 0], dtype=np.int64)
    bin_of, num_high = peel_rows(
        np.maximum(costs, 1), shared=costs, weights=weights, capacity=10, num_rows=2, bins_per_row=1, limit=None
    )
    assert num_high == 1
    assert bin_of.tolist() == [0, -1, -1]
