"""TorchSpec, approach C (R5, R7): the order of an epoch's prompts."""

import numpy as np
import pytest

from megatron_balance.adapters import torchspec
from megatron_balance.adapters.torchspec.plan import data_lengths
from megatron_balance.errors import BalanceError


def data(lengths):
    return [{"data_id": f"d{i}", "input_ids": np.zeros((1, length))} for i, length in enumerate(lengths)]


@pytest.fixture
def presorting(make_controller):
    def make(lengths, *, micro_batch_size=2, **asked):
        torchspec.install("C", **asked)
        controller = make_controller(dp_size=4, micro_batch_size=micro_batch_size)
        controller._stored_dataset = data(lengths)
        return controller

    return make


def ids(samples):
    return [sample["data_id"] for sample in samples]


@pytest.mark.parametrize("num_samples", [0, 7, 8, 83])
@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_every_sample_once_an_epoch(presorting, num_samples, micro_batch_size):
    controller = presorting(range(1, num_samples + 1), micro_batch_size=micro_batch_size)
    assert sorted(ids(controller._prepare_dataset())) == sorted(ids(controller._stored_dataset))


def test_a_dispatch_holds_neighbours_in_length(presorting):
    controller = presorting(np.random.default_rng(0).permutation(np.arange(1, 65)).tolist())
    lengths = data_lengths(controller._prepare_dataset())
    batches = [sorted(lengths[start : start + 8]) for start in range(0, 64, 8)]
    assert sorted(batches) == [list(range(first, first + 8)) for first in range(1, 65, 8)]
    assert lengths != sorted(lengths)


def test_larger_buckets_shuffle_within_them(presorting):
    controller = presorting(np.random.default_rng(0).permutation(np.arange(1, 65)).tolist(), bucket_batches=4)
    lengths = data_lengths(controller._prepare_dataset())
    batches = [lengths[start : start + 8] for start in range(0, 64, 8)]
    assert all(max(batch) <= 32 or min(batch) > 32 for batch in batches)
    assert any(max(batch) - min(batch) > 8 for batch in batches)


def test_a_run_resumes_where_it_stopped(presorting):
    controller = presorting(np.random.default_rng(0).integers(1, 5000, 83).tolist())
    whole = ids(controller._prepare_dataset())
    assert ids(controller._prepare_dataset(skip=24)) == whole[24:]
    assert ids(controller._prepare_dataset(skip=200)) == []


def test_seed_and_epoch_change_the_order(presorting):
    controller = presorting(np.random.default_rng(0).integers(1, 5000, 83).tolist())
    first = ids(controller._prepare_dataset())
    controller._dataset_epoch = 1
    second = ids(controller._prepare_dataset())
    controller._dataset_epoch, controller._dataset_seed = 0, 43
    third = ids(controller._prepare_dataset())
    assert first != second != third != first


class HasShape:
    shape = (1, 7)


def test_lengths_are_tokens_where_there_are_any():
    assert data_lengths([{"input_ids": [1, 2, 3]}, {"input_ids": HasShape()}]) == [3, 7]
    assert data_lengths([{"seq_len": 5, "input_ids": None}]) == [5]


def test_lengths_are_characters_where_tokenization_is_deferred():
    assert data_lengths([{"formatted_prompt": "abcd"}, {"formatted_prompt": "ab", "input_ids": [1]}]) == [4, 2]


def test_samples_without_lengths_are_told():
    with pytest.raises(BalanceError, match="neither input_ids"):
        data_lengths(["a prompt"])
