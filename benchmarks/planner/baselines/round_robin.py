"""Megatron's own sampler: no packing, no balancing."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.planner.setups import Setup


def round_robin(lengths: NDArray[np.int64], setup: Setup) -> list[list[list[int]]]:
    """Sample i of a step goes to rank `i % dp_size`, one sample a micro-batch.

    Where ranks meet in every micro-batch, the k-th samples of all ranks meet in slot k. Source: Megatron-LM's
    data samplers, which every system here starts from (and TorchSpec's dispatch, `i % dp_size`).
    """
    dp_size = setup.topology.dp_size
    return [[[sample] for sample in range(rank, lengths.size, dp_size)] for rank in range(dp_size)]
