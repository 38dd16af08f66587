"""Megatron main's `--sequence-packing-scheduler dp_balanced`: packs in order of arrival, balances nothing."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.planner.setups import Setup


def next_fit(lengths: NDArray[np.int64], setup: Setup) -> list[list[list[int]]]:
    """Next-fit up to the cap; micro-batch k goes to rank `k % dp_size`, slot `k // dp_size`.

    The number of micro-batches is brought to a multiple of the ranks: from the last one backwards, samples
    leave micro-batches that hold several and run alone at the end. Source: Megatron-LM main,
    `megatron/core/datasets/data_schedule.py`, class DpBalancedScheduler.

    Raises:
        ValueError: there are fewer samples than ranks.
    """
    dp_size = setup.topology.dp_size
    bins: list[list[int]] = []
    room = 0
    for sample, tokens in enumerate(setup.padded(lengths)):
        if not bins or tokens > room:
            bins.append([])
            room = setup.cap
        bins[-1].append(sample)
        room -= tokens

    last = len(bins) - 1
    while len(bins) % dp_size:
        if last < 0:
            raise ValueError(f"{lengths.size} samples do not fill a micro-batch on each of {dp_size} ranks")
        if len(bins[last]) > 1:
            bins.append([bins[last].pop()])
        else:
            last -= 1
    return [bins[rank::dp_size] for rank in range(dp_size)]
