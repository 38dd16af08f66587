"""Sorts of integers and kinds of samples, compared with plain Python."""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.planner import sorting
from megatron_balance.planner.kinds import Kinds
from megatron_balance.planner.sorting import run_starts, stable_order, sum_by_key

# Those of 2**62 do not fit into one int64 with an index.
KEYS = st.one_of(st.integers(-3, 3), st.integers(-(2**62), 2**62))


@given(keys=st.lists(KEYS, max_size=40))
def test_orders_by_key_then_index(keys: list[int]) -> None:
    right = sorted(range(len(keys)), key=lambda index: keys[index])
    for least in (1, sorting.MIN_KEYS):
        with patch.object(sorting, "MIN_KEYS", least):
            assert stable_order(np.array(keys, dtype=np.int64)).tolist() == right


@given(pairs=st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 9)), max_size=40))
def test_sums_by_key(pairs: list[tuple[int, int]]) -> None:
    keys, values = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    sums: Counter[int] = Counter()
    for key, value in pairs:
        sums[key] += value
    found, of_keys = sum_by_key(keys, values)
    assert list(zip(found.tolist(), of_keys.tolist(), strict=True)) == sorted(sums.items())


def test_runs_start_where_values_change() -> None:
    assert run_starts(np.array([4, 4, 7, 9, 9])).tolist() == [True, False, True, True, False]
    assert run_starts(np.array([], dtype=np.int64)).tolist() == []


@given(samples=st.lists(st.tuples(st.integers(0, 2**60), st.integers(0, 2), st.integers(0, 2)), max_size=40))
def test_kinds_are_the_distinct_samples_by_falling_cost(samples: list[tuple[int, int, int]]) -> None:
    # Few costs, so that some are shared by samples of different weight.
    samples = [(cost % 5 if cost % 2 else cost, weight, shared) for cost, weight, shared in samples]
    costs, weights, shared_costs = np.array(samples, dtype=np.int64).reshape(-1, 3).T
    kinds = Kinds.of(costs, shared_costs=shared_costs, weights=weights)
    counted = Counter(samples)
    falling = sorted(counted, reverse=True)
    assert list(zip(kinds.costs, kinds.weights, kinds.shared_costs, strict=True)) == falling
    assert kinds.counts.tolist() == [counted[kind] for kind in falling]
    assert [falling[kind] for kind in kinds.of_samples] == samples
    assert kinds.order().tolist() == sorted(range(len(samples)), key=lambda index: falling.index(samples[index]))
