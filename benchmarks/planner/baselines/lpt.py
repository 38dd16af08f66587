"""Longest first to the lightest rank, then first-fit on each rank."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.planner.baselines.split_bins import split_bins
from benchmarks.planner.setups import Setup
from megatron_balance.planner.partition import first_fit, greedy


def lpt(lengths: NDArray[np.int64], setup: Setup) -> list[list[list[int]]]:
    """Samples by falling FLOPs to the rank with least; first-fit decreasing under the cap on each rank.

    Ranks with fewer micro-batches than others split their fullest. Micro-batches meet by falling FLOPs.
    Source: R. L. Graham 1969; TorchSpec's approach A, without its count cap.

    Raises:
        ValueError: a rank has too few samples to split.
    """
    tokens, flops = setup.padded(lengths), setup.flops(lengths)
    parts = greedy(flops, num_parts=setup.topology.dp_size)
    packed = [first_fit([tokens[sample] for sample in part], capacity=setup.cap, decreasing=True) for part in parts]
    num_microbatches = max(map(len, packed))
    ranks: list[list[list[int]]] = []
    for part, bins in zip(parts, packed, strict=True):
        slots = [[part[position] for position in held] for held in bins]
        slots = split_bins(slots, tokens=tokens, num_bins=num_microbatches)
        slots.sort(key=lambda held: -sum(flops[sample] for sample in held))
        ranks.append(slots)
    return ranks
