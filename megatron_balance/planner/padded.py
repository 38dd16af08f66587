"""Plans of micro-batches that are padded to their longest sample: each holds and costs its samples times that.

In order of length a micro-batch is a run of neighbours. Runs are cut so that the costliest is as cheap as their number
allows, then given to ranks: neighbours to one slot where ranks meet in every micro-batch, else as evenly as they go.
"""

from __future__ import annotations

import numpy as np

from megatron_balance.errors import BalanceError
from megatron_balance.planner.batch import Batch
from megatron_balance.planner.fixed_ranks import partition_items
from megatron_balance.planner.inputs import NEVER


def plan_padded(batch: Batch, *, most: int | None, num_microbatches: int | None) -> list[list[list[int]]]:
    """For every rank, for every micro-batch, ascending sample ids: the fewest micro-batches, or as many as asked for.

    `most` is the number of samples that a micro-batch holds. None is empty where there are as many samples.
    """
    order = np.lexsort((-batch.own, -batch.weights))
    costs = batch.own[order].tolist()
    counts = (batch.cap // np.maximum(batch.weights[order], 1)).clip(1, most or NEVER).tolist()

    def runs(limit: int) -> list[int]:
        """Where runs end that hold as many samples as the caps and a limit of their cost allow."""
        ends = [0]
        while ends[-1] < len(costs):
            head = ends[-1]
            ends.append(min(head + min(counts[head], max(limit // costs[head], 1)), len(costs)))
        return ends

    needed = max(-(-(len(runs(NEVER)) - 1) // batch.num_ranks), 1)
    rows = num_microbatches or needed
    if rows < needed:
        raise BalanceError(f"num_microbatches is {rows}: padded samples need {needed} under the caps. Give that many.")
    low, high = 0, max(costs, default=0) * len(costs)
    while low < high:
        limit = (low + high) // 2
        low, high = (low, limit) if len(runs(limit)) - 1 <= rows * batch.num_ranks else (limit + 1, high)
    packs = np.split(np.arange(len(costs)), runs(high)[1:-1]) if costs else []
    while len(packs) < min(rows * batch.num_ranks, len(costs)):
        at = max(range(len(packs)), key=lambda pack: (packs[pack].size > 1, costs[packs[pack][0]] * packs[pack].size))
        packs[at : at + 1] = np.array_split(packs[at], 2)
    packs.sort(key=lambda pack: -costs[pack[0]] * pack.size)
    heights = np.zeros(rows * batch.num_ranks, dtype=np.int64)
    heights[: len(packs)] = [costs[pack[0]] * pack.size for pack in packs]
    rank_of = np.arange(heights.size) % batch.num_ranks
    if batch.span == 1:
        rank_of = partition_items(heights, num_parts=batch.num_ranks, equal_count=True)
    slots = [np.sort(order[pack]).tolist() for pack in packs] + [[] for _ in heights[len(packs) :]]
    return [[slots[index] for index in np.flatnonzero(rank_of == rank)] for rank in range(batch.num_ranks)]
