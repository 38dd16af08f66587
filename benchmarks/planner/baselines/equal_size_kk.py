"""verl and recsys-examples: the same number of samples to every rank, by Karmarkar-Karp."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.planner.setups import Setup
from megatron_balance.planner.partition import karmarkar_karp

LINEAR = 24576
"""verl's workload is `L² + LINEAR * L`, whatever the model."""


def equal_size_kk(lengths: NDArray[np.int64], setup: Setup) -> list[list[list[int]]]:
    """Equal-size Karmarkar-Karp over ranks, then free Karmarkar-Karp into micro-batches on each rank.

    Every rank makes as many micro-batches as the one with most tokens needs; nothing holds them to the cap
    (verl before 0.9.1; the row of its wheel shows what a strict cap changes). Micro-batches meet by falling
    cost, which is the best order for this row. recsys-examples' shuffler is the first half alone. Source:
    verl, `verl/utils/seqlen_balancing.py`; recsys-examples, `karmarkar_karp(..., equal_size=True)`.
    """
    tokens = setup.padded(lengths)
    workloads = [length**2 + LINEAR * length for length in tokens]
    parts = karmarkar_karp(workloads, num_parts=setup.topology.dp_size, equal_size=True)
    most_tokens = max(sum(tokens[sample] for sample in part) for part in parts)
    num_microbatches = max(min(-(-most_tokens // setup.cap), min(map(len, parts))), 1)
    ranks: list[list[list[int]]] = []
    for part in parts:
        slots = karmarkar_karp([workloads[sample] for sample in part], num_parts=num_microbatches)
        ranks.append([[part[position] for position in slot] for slot in slots])
    return ranks
