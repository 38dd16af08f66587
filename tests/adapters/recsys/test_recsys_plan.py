"""Assignment of rows to ranks; needs neither torch nor torchrec."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.adapters.recsys.plan import plan_rows, rows_of_batches


def plan(workloads, *, dp_size, batch_size, home_ranks=None, nbytes=None):
    workloads = np.array(workloads, dtype=np.int64)
    ones = np.ones_like(workloads)
    return plan_rows(
        workloads,
        nbytes=ones if nbytes is None else np.array(nbytes),
        home_ranks=np.arange(workloads.size) % dp_size if home_ranks is None else np.array(home_ranks),
        dp_size=dp_size,
        batch_size=batch_size,
    )


@settings(deadline=None)
@given(st.data())
def test_every_row_has_a_rank_and_no_rank_too_many(data):
    dp_size, batch_size = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    workloads = data.draw(st.lists(st.integers(0, 2**50), max_size=dp_size * batch_size))
    ranks = plan(workloads, dp_size=dp_size, batch_size=batch_size)
    counts = np.bincount(ranks, minlength=dp_size)
    assert ranks.size == len(workloads)
    assert counts.size == dp_size
    assert counts.max() <= batch_size
    assert counts.min() >= min(len(workloads) // dp_size, 1)


@settings(deadline=None)
@given(st.data())
def test_the_rows_of_all_batches_are_all_positions(data):
    dp_size, batch_size = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    filling = data.draw(st.lists(st.integers(0, batch_size), min_size=dp_size, max_size=dp_size))
    positions = np.concatenate([rank * batch_size + np.arange(count) for rank, count in enumerate(filling)])
    ranks = plan(np.ones(positions.size), dp_size=dp_size, batch_size=batch_size)
    rows = rows_of_batches(ranks, positions=positions, dp_size=dp_size, batch_size=batch_size)
    assert sorted(rows.reshape(-1).tolist()) == list(range(dp_size * batch_size))
    for rank, of_rank in enumerate(rows.tolist()):
        num_rows = int((ranks == rank).sum())
        assert of_rank[:num_rows] == positions[ranks == rank].tolist()
        assert of_rank[num_rows:] == sorted(set(of_rank[num_rows:]) - set(positions.tolist()))


@pytest.mark.parametrize("seed", range(3))
def test_near_the_best_of_all_ways(seed):
    rng = np.random.default_rng(seed)
    excess = []
    for _ in range(50):
        workloads = np.maximum(rng.lognormal(5, 1.5, 8), 1).astype(np.int64)
        ranks = plan(workloads, dp_size=2, batch_size=4)
        half = [workloads[list(rows)].sum() for rows in combinations(range(8), 4)]
        best = min(max(int(load), int(workloads.sum() - load)) for load in half)
        excess.append(np.bincount(ranks, weights=workloads).max() / best)
    assert max(excess) < 1.1
    assert np.mean(excess) < 1.01


def test_rows_stay_at_home_where_that_costs_nothing():
    homes = [1, 1, 0, 0]
    assert plan([5, 5, 5, 5], dp_size=2, batch_size=2, home_ranks=homes).tolist() == homes


def test_workloads_beyond_int64_in_sum():
    ranks = plan([2**62 - 1] * 8, dp_size=4, batch_size=3)
    assert np.bincount(ranks).tolist() == [2, 2, 2, 2]


def test_128_ranks_of_128_rows_within_a_thousandth():
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 1, 128 * 128), 0, 4096).astype(np.int64)
    workloads = lengths * 1024**2 * 30 + lengths**2 * 7 * 1024
    ranks = plan(workloads, dp_size=128, batch_size=128)
    loads = np.bincount(ranks, weights=workloads)
    assert loads.max() <= 1.001 * loads.mean()
