"""R10, R12: bare partitions as verl asks for them; 62 rows over 4 ranks, and uids that come again."""

from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance import BalanceError, CostModel
from megatron_balance.adapters.verl.plan import (
    balanced_partitions,
    group_balanced_partitions,
    minibatches_in_order,
    minibatches_of_parts,
    order_rows,
)
from megatron_balance.adapters.verl.workload import choose_workload, workloads

TOKENS = CostModel.tokens()


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**60), min_size=1, max_size=40), st.integers(1, 8), st.booleans())
def test_every_index_once_and_no_part_empty(loads, num_parts, equal_size):
    num_parts = min(num_parts, len(loads))
    parts = balanced_partitions(loads, num_parts=num_parts, equal_size=equal_size)
    assert sorted(chain.from_iterable(parts)) == list(range(len(loads)))
    assert len(parts) == num_parts
    assert all(parts)
    assert all(part == sorted(part) for part in parts)
    if equal_size:
        assert max(map(len, parts)) == -(-len(loads) // num_parts)
        if len(loads) % num_parts == 0:
            assert {len(part) for part in parts} == {len(loads) // num_parts}


def test_62_rows_over_4_ranks():
    loads = [length**2 + 24576 * length for length in range(1, 63)]
    parts = balanced_partitions(loads, num_parts=4, equal_size=True)
    assert sorted(map(len, parts), reverse=True) == list(map(len, parts))
    assert max(map(len, parts)) == 16
    sums = [sum(loads[row] for row in part) for part in parts]
    assert max(sums) * 4 / sum(sums) < 1.01


def test_tensors_are_loads():
    loads = [9, 1, 1, 7]
    expected = balanced_partitions(loads, num_parts=2, equal_size=True)
    for given_loads in (torch.tensor(loads), torch.tensor(loads).float(), [torch.tensor(load) for load in loads]):
        assert balanced_partitions(given_loads, num_parts=2, equal_size=True) == expected


def test_equal_sizes_on_a_heavy_tail():
    """The costliest rank over what no partition beats: the mean, or the largest row with the smallest others."""
    cost_model = choose_workload("Qwen3-8B")
    ratios = []
    for seed in range(50):
        draws = np.random.default_rng(seed).lognormal(7.5, 1.2, 128)
        loads = workloads(np.clip(draws, 64, 32768).astype(np.int64), cost_model=cost_model)
        parts = balanced_partitions(loads, num_parts=8, equal_size=True)
        sums = np.array([loads[part].sum() for part in parts])
        smallest = np.sort(loads)[:15].sum()
        ratios.append(sums.max() / max(sums.mean(), loads.max() + smallest))
    assert np.mean(ratios) <= 1.001


def test_what_cannot_be_parted_is_named():
    with pytest.raises(BalanceError, match="k_partitions is 3"):
        balanced_partitions([1, 2], num_parts=3, equal_size=True)
    with pytest.raises(BalanceError, match=r"workload 1 is 0\.5"):
        balanced_partitions([1.0, 0.5], num_parts=2, equal_size=True)


def test_a_uid_that_comes_again_is_not_split():
    uids = ["a", "b", "a", "c", "b", "d", "c", "d"]
    lengths = np.array([900, 10, 900, 20, 10, 500, 20, 500])
    parts = group_balanced_partitions(lengths, uids=uids, num_parts=2, cost_model=TOKENS)
    held = [[uids[row] for row in part] for part in parts]
    assert [len(part) for part in parts] == [4, 4]
    assert not set(held[0]) & set(held[1])
    # Rows of a uid are neighbours: that is what shares a prefix.
    assert all(part[0] == part[1] and part[2] == part[3] for part in held)
    # a with the lightest group, whichever way: 1800 + 20 against 1000 + 40.
    assert {"a", "b"} in map(set, held)


def test_fewer_groups_than_ranks_are_named():
    with pytest.raises(BalanceError, match="1 groups of rows"):
        group_balanced_partitions(np.array([1, 2]), uids=["a", "a"], num_parts=2, cost_model=TOKENS)


@settings(deadline=None)
@given(st.lists(st.integers(0, 5000), min_size=24, max_size=24), st.sampled_from([4, 8, 12, 24]))
def test_mini_batches_keep_their_rows(lengths, minibatch_rows):
    """R15: slice i of all ranks together is mini-batch i, and each rank has as many rows of it."""
    minibatches = minibatches_in_order(24, minibatch_rows=minibatch_rows)
    order = order_rows(np.array(lengths), num_ranks=4, cost_model=TOKENS, minibatches=minibatches)
    each = minibatch_rows // 4
    for index, ids in enumerate(minibatches):
        slices = [part[index * each : (index + 1) * each] for part in order.parts]
        assert sorted(np.concatenate(slices).tolist()) == ids.tolist()


def test_no_row_is_lost_from_a_short_last_mini_batch():
    minibatches = minibatches_in_order(10, minibatch_rows=4)
    order = order_rows(np.arange(10), num_ranks=2, cost_model=TOKENS, minibatches=minibatches)
    assert sorted(order.rows.tolist()) == list(range(10))


def test_mini_batches_that_verl_forms_of_parts():
    # Two ranks, parts 0..5 and 6..11, three slices each.
    found = minibatches_of_parts(12, num_ranks=2, minibatch_rows=4)
    assert [ids.tolist() for ids in found] == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]


def test_forced_groups_stay_neighbours():
    order = order_rows(np.arange(16), num_ranks=2, cost_model=TOKENS, force_group_size=2)
    for part in order.parts:
        pairs = part.reshape(-1, 2)
        assert (pairs[:, 1] == pairs[:, 0] + 1).all()
        assert (pairs[:, 0] % 2 == 0).all()


def test_places_undo_rows():
    order = order_rows(np.array([5, 1, 9, 4, 2, 8]), num_ranks=3, cost_model=TOKENS)
    assert order.rows[order.places].tolist() == list(range(6))
    assert order.rows.tolist() != list(range(6))


def test_cheap_rows_are_at_both_ends_of_a_part():
    order = order_rows(np.arange(1, 17), num_ranks=2, cost_model=TOKENS)
    for part in order.parts:
        assert {int(part[0]), int(part[-1])} == set(np.sort(part)[:2].tolist())
