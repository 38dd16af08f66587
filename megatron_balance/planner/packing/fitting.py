"""Raises the number of micro-batches until a packing fits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from megatron_balance.planner.partition import first_fit
from megatron_balance.planner.problem import Problem

Pack = Callable[[int, int], NDArray[np.int64] | None]
"""Packs into (num_microbatches, capacity of one): the bin of each sample, or None where one found no room."""


def pack_fitting(problem: Problem, *, num_microbatches: int, pack: Pack) -> tuple[NDArray[np.int64], int]:
    """Packs with as many micro-batches as it takes, from `num_microbatches`.

    Where micro-batches hold a number of samples, each holds an even share of them at most.

    Returns:
        bin_of: `[num_samples]`, as `pack` numbers them.
        num_microbatches: that it took.
    """
    dp_size, multiple = problem.topology.dp_size, problem.topology.microbatch_multiple
    attempts = 0
    while True:
        capacity = capacity_of_one(problem, num_microbatches=num_microbatches)
        bin_of = pack(num_microbatches, capacity)
        if bin_of is not None:
            return bin_of, num_microbatches
        # Longer strides after some attempts: with awkward lengths the start may be far too small.
        attempts += 1
        num_microbatches += multiple * max(1 + attempts // 4, num_microbatches // (64 * multiple))
        if attempts == 1 and not problem.counts_samples:
            # Filling by cost will not succeed with fewer bins than first fit decreasing by weight.
            num_bins = len(first_fit(problem.weights, capacity=capacity, decreasing=True))
            num_microbatches = max(num_microbatches, -(-num_bins // (dp_size * multiple)) * multiple)


def capacity_of_one(problem: Problem, *, num_microbatches: int) -> int:
    """Tokens that a micro-batch holds, or samples: an even share of them at most."""
    if not problem.counts_samples:
        return problem.capacity
    even = -(-problem.num_samples // (problem.topology.dp_size * num_microbatches))
    return max(1, min(problem.capacity, even))
