"""slime: pack the whole step into micro-batches, then hand those to ranks, as many to each.

Source: slime, `build_dp_schedule` in `slime/utils/dp_schedule.py`, and pull request 2017 for FLOPs. Three
rows share the steps: pack; split until the ranks divide the number; distribute.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.planner.baselines.split_bins import split_bins
from benchmarks.planner.setups import Setup
from megatron_balance.planner.partition import first_fit, karmarkar_karp


def first_fit_only(lengths: NDArray[np.int64], setup: Setup) -> list[list[list[int]]]:
    """First-fit in order of arrival; micro-batch k goes to rank `k % dp_size`. No flag of slime's is set."""
    tokens = setup.padded(lengths)
    bins = _divisible(first_fit(tokens, capacity=setup.cap), tokens=tokens, setup=setup)
    dp_size = setup.topology.dp_size
    return [bins[rank::dp_size] for rank in range(dp_size)]


def first_fit_then_kk(lengths: NDArray[np.int64], setup: Setup) -> list[list[list[int]]]:
    """First-fit in order of arrival; equal-size Karmarkar-Karp on tokens deals micro-batches to ranks.

    slime's `--balance-data`, the base line of its published figures.
    """
    tokens = setup.padded(lengths)
    bins = _divisible(first_fit(tokens, capacity=setup.cap), tokens=tokens, setup=setup)
    return _dealt(bins, costs=tokens, setup=setup)


def kk_by_flops(lengths: NDArray[np.int64], setup: Setup) -> list[list[list[int]]]:
    """Free Karmarkar-Karp on FLOPs into `ceil(tokens / cap)` micro-batches, whatever they then hold.

    Equal-size Karmarkar-Karp on FLOPs deals them to ranks. slime's `--balance-data --balance-by-flops`. Here it
    gets this package's FLOPs, which are closer to the truth than slime's own.
    """
    tokens, flops = setup.padded(lengths), setup.flops(lengths)
    num_bins = min(-(-sum(tokens) // setup.cap), lengths.size)
    bins = [held for held in karmarkar_karp(flops, num_parts=num_bins) if held]
    return _dealt(_divisible(bins, tokens=tokens, setup=setup), costs=flops, setup=setup)


def _divisible(bins: list[list[int]], *, tokens: list[int], setup: Setup) -> list[list[int]]:
    dp_size = setup.topology.dp_size
    return split_bins(bins, tokens=tokens, num_bins=-(-len(bins) // dp_size) * dp_size)


def _dealt(bins: list[list[int]], *, costs: list[int], setup: Setup) -> list[list[list[int]]]:
    weights = [sum(costs[sample] for sample in held) for held in bins]
    parts = karmarkar_karp(weights, num_parts=setup.topology.dp_size, equal_size=True)
    return [[bins[index] for index in part] for part in parts]
