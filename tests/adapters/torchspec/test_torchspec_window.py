"""TorchSpec, approach B (R4): which samples leave, and how late."""

from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.adapters.torchspec import window
from megatron_balance.adapters.torchspec.window import DispatchWindow


def drive(lengths, *, window, batch_size, dp_size=2, cost="padded"):
    """Sample ids of each dispatch, and the delays; the pool is filled to the window before each dispatch."""
    held = DispatchWindow(window, dispatch_batch_size=batch_size, dp_size=dp_size, cost=cost)
    pool, coming, dispatched = deque(), deque(range(len(lengths))), []
    while coming or len(pool) >= batch_size:
        while coming and len(pool) < held.capacity:
            pool.append(coming.popleft())
        if len(pool) < batch_size:
            break
        oldest = min(pool)
        held.arrange(pool, lengths=[lengths[sample] for sample in pool])
        dispatched.append([pool.popleft() for _ in range(batch_size)])
        held.leave()
        assert dispatched[-1][0] == oldest
    return dispatched, held, sorted(pool)


@pytest.mark.parametrize("cost", ["padded", "tokens"])
@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9999), max_size=120),
    window=st.integers(2, 4),
    batch_size=st.sampled_from([2, 4, 6]),
)
def test_the_oldest_always_leaves_and_none_later_than_the_bound(cost, lengths, window, batch_size):
    dispatched, held, left = drive(lengths, window=window, batch_size=batch_size, cost=cost)
    gone = [sample for batch in dispatched for sample in batch]
    assert sorted(gone + left) == list(range(len(lengths)))
    assert len(left) < batch_size
    delays = [max(turn - sample // batch_size, 0) for turn, batch in enumerate(dispatched) for sample in batch]
    metrics = held.metrics()
    assert metrics.num_dispatches == len(dispatched)
    assert metrics.max_delay == max(delays, default=0) <= held.max_delay == 2 * window
    assert metrics.mean_delay == pytest.approx(sum(delays) / max(len(delays), 1))


def test_a_sample_that_would_be_later_than_the_bound_leaves(monkeypatch):
    lengths = np.random.default_rng(0).lognormal(7.5, 1.0, 4000).astype(int).tolist()
    _, held, _ = drive(lengths, window=2, batch_size=32, dp_size=8)
    assert held.metrics().max_delay > 2
    monkeypatch.setattr(window, "MAX_DELAY_WINDOWS", 1)
    _, held, _ = drive(lengths, window=2, batch_size=32, dp_size=8)
    assert held.metrics().max_delay == held.max_delay == 2


@settings(deadline=None)
@given(lengths=st.lists(st.integers(0, 99), min_size=12, max_size=12))
def test_the_oldest_leaves_among_its_neighbours_in_length(lengths):
    dispatched, _, _ = drive(lengths, window=3, batch_size=4)
    by_length = sorted(range(12), key=lambda sample: (-lengths[sample], sample))
    places = sorted(by_length.index(sample) for sample in dispatched[0])
    assert places == list(range(places[0], places[0] + 4))
    assert by_length.index(0) in places


def test_a_pool_beyond_the_window_waits_its_turn():
    held = DispatchWindow(2, dispatch_batch_size=2, dp_size=2, cost="padded")
    pool = deque(range(6))
    # The sixth is the oldest's equal, but the window holds four.
    held.arrange(pool, lengths=[500, 1, 2, 490, 3, 500])
    assert list(pool) == [0, 3, 1, 2, 4, 5]


def test_samples_that_someone_else_took_from_the_front_are_forgotten():
    held = DispatchWindow(2, dispatch_batch_size=2, dp_size=2, cost="padded")
    pool = deque(range(4))
    held.arrange(pool, lengths=[5, 1, 1, 5])
    assert list(pool) == [0, 3, 1, 2]
    pool.popleft()
    pool.popleft()
    held.arrange(pool, lengths=[1, 1])
    held.leave()
    assert held.metrics().num_dispatches == 1


@pytest.mark.parametrize(
    ("lengths", "leaving"),
    [
        ([500, 10, 9000, 11, 510, 13, 490, 505], [0, 4, 6, 7]),
        ([10, 500, 9000, 11, 510, 13, 490, 12], [0, 3, 5, 7]),  # the shortest is the oldest
        ([9000, 10, 500, 11, 510, 13, 490, 505], [0, 2, 4, 7]),  # the longest is: what is nearest goes with it
        ([0] * 8, [0, 1, 2, 3]),
    ],
)
def test_those_leave_that_pad_least(lengths, leaving):
    assert sorted(drive(lengths, window=2, batch_size=4)[0][0]) == leaving
