"""Micro-batches filled up to multiples of tokens stay below the cap."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_balance.errors import BalanceError
from megatron_balance.mcore.setup.settings import bucketed_limits, filled_tokens
from megatron_balance.topology import Limits, Topology


def test_a_bucket_above_the_cap_is_refused_and_over_long_samples_are_not_filled() -> None:
    topology = Topology(2, cp_size=2)
    limits = bucketed_limits(1000, topology=topology, shape_bucket=300)
    assert limits == Limits(900)
    filled = filled_tokens(np.array([4, 600, 1800, 1804]), topology=topology, limits=limits, shape_bucket=300)
    assert filled.tolist() == [600, 600, 1800, 1804]
    with pytest.raises(BalanceError, match="--balance-shape-bucket is 3000"):
        bucketed_limits(1000, topology=topology, shape_bucket=3000)


def test_alignment_holds_for_over_long_samples_and_dummies_too() -> None:
    topology = Topology(2, cp_size=2, tp_size=2, sequence_parallel=True, token_alignment=32)
    limits = bucketed_limits(1000, topology=topology, shape_bucket=300)
    assert limits == Limits(960)  # a bucket of 320: 300 tokens, raised to shares of 32 on two sequence-parallel ranks
    filled = filled_tokens(np.array([0, 8, 1288, 1920, 1928]), topology=topology, limits=limits, shape_bucket=300)
    assert filled.tolist() == [256, 640, 1920, 1920, 2048]
    with pytest.raises(BalanceError, match=r"multiples of 64 tokens .*alignment is 32 .*--max-tokens-per-gpu 60 holds"):
        bucketed_limits(60, topology=topology, shape_bucket=1)
