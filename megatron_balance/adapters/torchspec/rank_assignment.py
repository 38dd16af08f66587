"""Approach A: which rank gets which samples of a dispatch.

    padded  the samples are sorted by length and cut into runs: the sum of the ranks' padded tokens is the least
            possible, and the slowest rank, that with the longest sample, is as slow as it must be
    tokens  longest first, each to the lightest rank that has room; then exchanges that relieve the heaviest rank

Invariants: every rank gets exactly `num_samples / dp_size` samples, in order of arrival, because its data fetcher
waits for that many; the same samples in the same turn go to the same ranks. Which rank gets the longest run changes
from turn to turn, so that no rank is the slowest of every micro-batch of a step.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_balance.adapters.torchspec.sample_lengths import result_length
from megatron_balance.adapters.torchspec.settings import Settings
from megatron_balance.hooking.patches import Function
from megatron_balance.planner.partition import greedy, refine_parts
from megatron_balance.planner.selection.bucketing import bucketed_order


def assign_ranks(lengths: Sequence[int], *, dp_size: int, cost: str, turn: int = 0) -> list[list[int]]:
    """Positions of the samples that each rank gets.

    Args:
        lengths: `[num_samples]` tokens, as many for every rank.
        dp_size: ranks.
        cost: `padded` or `tokens`.
        turn: number of the dispatch.

    Returns:
        `[dp_size]` lists of `num_samples / dp_size` positions, ascending.
    """
    count = len(lengths) // dp_size
    if cost == "padded":
        runs = bucketed_order(lengths, batch_size=count, bucket_batches=1, epoch=turn)
        return [sorted(run) for run in runs.reshape(dp_size, count).tolist()]
    tokens = np.array(lengths, dtype=np.int64)
    rank_of = np.empty_like(tokens)
    for rank, positions in enumerate(greedy(lengths, num_parts=dp_size, max_count=count)):
        rank_of[positions] = rank
    rank_of = refine_parts(
        tokens,
        weights=np.ones_like(tokens),
        capacity=count,
        bin_of=rank_of,
        bins_per_part=1,
        num_parts=dp_size,
        target=-(-int(tokens.sum()) // dp_size),
    )
    return [np.flatnonzero(rank_of == rank).tolist() for rank in range(dp_size)]


def with_ranks_by_length(partition_results: Function, *, settings: Settings) -> Function:
    """`_partition_results` that looks at lengths, where a rank gets several samples and all ranks as many.

    With one sample a rank (micro_batch_size 1, or evaluation) there is nothing to choose, and TorchSpec's own
    function is called.
    """

    @functools.wraps(partition_results)
    def wrapper(controller: Any, results: list[Any]) -> list[list[Any]]:
        count, left = divmod(len(results), controller.dp_size)
        if count <= 1 or left or controller.dp_size == 1:
            return partition_results(controller, results)
        lengths = [result_length(result) for result in results]
        ranks = assign_ranks(lengths, dp_size=controller.dp_size, cost=settings.cost, turn=controller.batch_id)
        return [[results[position] for position in positions] for positions in ranks]

    return wrapper
