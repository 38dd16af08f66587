"""Buckets: every sample once, like lengths together, another order for another seed, the same order for the same."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance import BalanceError
from megatron_balance.adapters.torchspec import bucketed_order

lengths_of_samples = st.lists(st.integers(0, 1000), max_size=70)


@settings(deadline=None)
@given(lengths_of_samples, st.integers(1, 9), st.integers(1, 8), st.integers(0, 3), st.integers(0, 3))
def test_every_sample_once_and_buckets_do_not_overlap(lengths, batch_size, bucket_batches, seed, epoch):
    asked = {"batch_size": batch_size, "bucket_batches": bucket_batches, "seed": seed, "epoch": epoch}
    order = bucketed_order(lengths, **asked)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(len(lengths)))
    assert np.array_equal(order, bucketed_order(lengths, **asked))
    num_batches = len(lengths) // batch_size
    batches = np.array(lengths, dtype=np.int64)[order[: num_batches * batch_size]].reshape(num_batches, batch_size)
    # A batch of one bucket lies wholly below or above one of another, so few batches may overlap a batch.
    for batch in batches:
        overlapping = ((batches.min(axis=1) < batch.max()) & (batches.max(axis=1) > batch.min())).sum()
        assert overlapping <= bucket_batches


def skewed_lengths(num_samples=4000):
    return np.random.default_rng(0).lognormal(6, 1, size=num_samples).astype(np.int64) + 1


def padding(lengths, order, *, batch_size):
    batches = lengths[order[: len(order) // batch_size * batch_size]].reshape(-1, batch_size)
    return (batches.max(axis=1) * batch_size).sum() / batches.sum()


def test_smaller_buckets_pad_less_and_drift_more():
    lengths = skewed_lengths()
    orders = [bucketed_order(lengths, batch_size=16, bucket_batches=n) for n in (1, 10, 250)]
    paddings = [padding(lengths, order, batch_size=16) for order in orders]
    means = [lengths[order].reshape(-1, 16).mean(axis=1) / lengths.mean() for order in orders]
    assert paddings[0] < 1.1 < paddings[1] * 1.05 < paddings[2]
    assert means[0].std() > means[1].std() > means[2].std() * 2
    assert means[0].min() < means[2].min() < 1 < means[2].max() < means[0].max()


def test_seed_and_epoch_change_batches_and_their_order():
    lengths = skewed_lengths(512)
    orders = [
        bucketed_order(lengths, batch_size=8, bucket_batches=4, seed=seed, epoch=epoch)
        for seed, epoch in ((0, 0), (1, 0), (0, 1), (1, 1))
    ]
    batches = [{frozenset(batch) for batch in order.reshape(-1, 8).tolist()} for order in orders]
    for one in range(4):
        for two in range(one):
            assert len(batches[one] & batches[two]) < 8


def test_a_batch_that_is_not_whole_is_drawn_from_all_lengths():
    lengths = np.arange(103)
    last = [bucketed_order(lengths, batch_size=10, bucket_batches=2, seed=seed)[100:] for seed in range(40)]
    assert 30 < np.mean(lengths[np.concatenate(last)]) < 72


@pytest.mark.parametrize(
    ("options", "phrase"),
    [
        ({"bucket_batches": -1}, "bucket_batches is -1"),
        ({"bucket_batches": 1, "batch_size": 0}, "batch_size is 0"),
        ({"bucket_batches": 1, "seed": -1}, "seed is -1"),
    ],
)
def test_arguments_that_cannot_be(options, phrase):
    with pytest.raises(BalanceError, match=phrase):
        bucketed_order([1, 2], **{"batch_size": 1, **options})
