"""The name of a sample is its index in the data set: compared with what Megatron's sampler deals out."""

from __future__ import annotations

import argparse

import pytest

from megatron_balance.mcore.step.sample_origin import SampleOrigin


@pytest.mark.parametrize("consumed", [0, 24])
@pytest.mark.parametrize(("dp_size", "micro_batch_size"), [(1, 1), (2, 1), (3, 2)])
def test_the_index_is_the_one_that_the_sampler_deals(consumed: int, dp_size: int, micro_batch_size: int) -> None:
    from megatron.training.datasets.data_samplers import MegatronPretrainingSampler

    args = argparse.Namespace(
        dataloader_type="single", consumed_train_samples=consumed, micro_batch_size=micro_batch_size
    )
    for dp_rank in range(dp_size):
        origin = SampleOrigin.from_megatron_args(args, dp_rank=dp_rank, dp_size=dp_size)
        assert origin is not None
        sampler = MegatronPretrainingSampler(60, consumed, micro_batch_size, dp_rank, dp_size)
        for item, samples in enumerate(sampler):
            assert [origin.sample_of(item, row=row) for row in range(micro_batch_size)] == samples


def test_another_sampler_is_not_guessed() -> None:
    args = argparse.Namespace(dataloader_type="cyclic", consumed_train_samples=0, micro_batch_size=1)
    assert SampleOrigin.from_megatron_args(args, dp_rank=0, dp_size=1) is None
