"""The name of a sample in an error is its index in the data set: compared with what Megatron's sampler deals out.

It reads below the public names: the sampler is checked item by item, and a run names one item at most.
"""

from __future__ import annotations

import pytest

from megatron_balance.mcore.step.source import SampleOrigin


@pytest.mark.parametrize("consumed", [0, 24])
@pytest.mark.parametrize(("dp_size", "micro_batch_size"), [(1, 1), (2, 1), (3, 2)])
def test_the_index_is_the_one_that_the_sampler_deals(consumed: int, dp_size: int, micro_batch_size: int) -> None:
    from megatron.training.datasets.data_samplers import MegatronPretrainingSampler

    for dp_rank in range(dp_size):
        origin = SampleOrigin(consumed, micro_batch_size, dp_rank=dp_rank, dp_size=dp_size)
        sampler = MegatronPretrainingSampler(60, consumed, micro_batch_size, dp_rank, dp_size)
        for item, samples in enumerate(sampler):
            assert [origin.sample_of(item, row=row) for row in range(micro_batch_size)] == samples
