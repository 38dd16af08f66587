"""The plan of a rank's micro-batches, without verl: the cap, the count, and what cannot be done."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance import BalanceError, CostModel
from megatron_balance.adapters.verl.micro_batches import MicroBatchLimits, plan_micro_batches
from megatron_balance.planner.images import Images

FORMULA = CostModel(linear=24576, quadratic=1)


def plan(lengths, max_token_len, *, mountain=True, cost_model=FORMULA, image_patches=None, **limits):
    planned = plan_micro_batches(
        np.array(lengths, dtype=np.int64),
        limits=MicroBatchLimits(max_token_len, **limits),
        cost_model=cost_model,
        images=None if image_patches is None else Images.of(image_patches, num_samples=len(lengths)),
        mountain=mountain,
    )
    assert sorted(chain.from_iterable(planned)) == list(range(len(lengths)))
    assert all(planned)
    return planned


def test_eight_sevens_under_a_cap_of_eight():
    assert sorted(plan([7] * 8, 8)) == [[row] for row in range(8)]


@settings(deadline=None)
@given(st.lists(st.integers(0, 100), min_size=1, max_size=30), st.integers(100, 400))
def test_the_cap_is_kept(lengths, cap):
    planned = plan(lengths, cap)
    assert max(sum(lengths[row] for row in rows) for rows in planned) <= cap
    assert len(planned) >= -(-sum(lengths) // cap)


def test_no_more_micro_batches_than_the_tokens_ask_for():
    """25 rows of 50 to 89 tokens fill 6 micro-batches of 300 to nine tenths."""
    fewest = 0
    for seed in range(100):
        lengths = np.random.default_rng(seed).integers(50, 90, 25)
        fewest += len(plan(lengths, 300)) == -(-int(lengths.sum()) // 300)
    assert fewest >= 97


@pytest.mark.parametrize("seed", [1, 21, 26, 31, 56])
def test_tightly_packed_micro_batches_share_the_images(seed):
    """Ten rows that fill four micro-batches, which target heights pack into five; four have an image."""
    lengths = np.random.default_rng(seed).integers(40, 95, 10)
    images = [[300] if row % 3 == 0 else [] for row in range(10)]
    model = CostModel(linear=1, image_linear=1)
    costs = [
        sum(lengths[row] + sum(images[row]) for row in rows)
        for rows in plan(lengths, 190, cost_model=model, image_patches=images)
    ]
    assert max(costs) < 1.05 * np.mean(costs)


def test_forced_groups_share_the_images():
    images = [[64], [], [32], [32], [], [], [], []]
    model = CostModel(linear=1, image_linear=1)
    planned = plan([10] * 8, 40, cost_model=model, image_patches=images, force_group_size=2)
    assert sorted(sum(sum(images[row]) for row in rows) for rows in planned) == [64, 64]


def test_a_multiple_and_a_least_count():
    assert len(plan([5] * 12, 20)) == 3
    assert len(plan([5] * 12, 20, multiple=4)) == 4
    assert len(plan([5] * 12, 20, min_num_micro_batch=5)) == 5
    assert len(plan([5] * 12, 20, multiple=4, min_num_micro_batch=5)) == 8


def test_forced_groups_stay_together():
    for rows in plan(range(1, 13), 40, force_group_size=2):
        assert all(row % 2 or row + 1 in rows for row in rows)


def test_cheap_micro_batches_at_both_ends():
    lengths = [10, 20, 30, 40, 50, 60, 70]
    costs = [sum(lengths[row] for row in rows) for rows in plan(lengths, 70)]
    assert {costs[0], costs[-1]} == set(sorted(costs)[:2])
    falling = [sum(lengths[row] for row in rows) for rows in plan(lengths, 70, mountain=False)]
    assert falling == sorted(falling, reverse=True)


@pytest.mark.parametrize(
    ("lengths", "limits", "message"),
    [
        ([9, 3], {}, "1 rows or forced groups are over max_token_len 8"),
        ([5, 5], {"force_group_size": 2}, "over max_token_len 8"),
        ([5, 5], {"min_num_micro_batch": 3}, "rank 0 has 2 rows"),
        ([5, 5, 5], {"force_group_size": 2}, "the batch has 3 rows"),
        ([], {}, "the batch has 0 rows"),
    ],
    ids=["row over the cap", "group over the cap", "too few rows", "half a group", "no rows"],
)
def test_what_cannot_be_done_is_named(lengths, limits, message):
    with pytest.raises(BalanceError, match=message):
        plan(lengths, 8, **limits)
