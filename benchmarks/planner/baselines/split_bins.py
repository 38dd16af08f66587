"""More micro-batches than packing made: the one with most tokens is halved until there are enough."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from megatron_balance.planner.partition import greedy


def split_bins(bins: list[list[int]], *, tokens: Sequence[int], num_bins: int) -> list[list[int]]:
    """Halves the fullest of the bins that hold several samples, by tokens, longest sample first.

    Source: slime, `expand_bins_by_splitting` in `slime/utils/seqlen_balancing.py`.

    Raises:
        ValueError: there are not enough samples.
    """
    bins = [list(held) for held in bins]
    splittable = [(-sum(tokens[sample] for sample in held), index) for index, held in enumerate(bins) if len(held) > 1]
    heapify(splittable)
    while len(bins) < num_bins:
        if not splittable:
            raise ValueError(f"there are {len(bins)} bins of one sample: {num_bins} cannot be made")
        _, index = heappop(splittable)
        whole = bins[index]
        halves = greedy([tokens[sample] for sample in whole], num_parts=2)
        for place, half in zip((index, len(bins)), halves, strict=True):
            held = [whole[position] for position in half]
            if place == index:
                bins[index] = held
            else:
                bins.append(held)
            if len(held) > 1:
                heappush(splittable, (-sum(tokens[sample] for sample in held), place))
    return bins
