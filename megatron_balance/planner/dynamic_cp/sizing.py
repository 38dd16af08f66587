"""Computes cost and tokens of every sample at every context-parallel size from lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cost.model import MAX_TOTAL_COST, CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.planner.dynamic_cp.samples import SizedSamples
from megatron_balance.planner.inputs import sum_segments
from megatron_balance.topology import Limits, Topology


def size_samples(
    lengths: NDArray[np.int64],
    *,
    cost_model: CostModel,
    topology: Topology,
    limits: Limits,
    num_segments: NDArray[np.int64] | None = None,
) -> tuple[SizedSamples, int]:
    """Computes padded tokens and cost of every sample at every size.

    Expert layers that an expert-parallel group shares are counted as if each rank computed its own tokens', which is
    an upper bound on the time of a micro-batch.

    Args:
        lengths: `[num_samples]` original tokens; with `num_segments`, of every segment.
        cost_model: cost of a sample.
        topology: the ranks, with dynamic context-parallel sizes.
        limits: tokens that a GPU holds.
        num_segments: `[num_samples]` segments of each sample.

    Returns:
        The samples, and the power of two that all costs were divided by so that sums over all ranks stay
        below 2**62.

    Raises:
        BalanceError: micro-batches are limited by samples instead of tokens.
    """
    if limits.max_tokens_per_gpu is None:
        raise BalanceError(
            f"Limits.micro_batch_size is {limits.micro_batch_size} with Topology.dynamic_cp: sizes follow from a token "
            "cap, so set max_tokens_per_gpu instead."
        )
    sizes = topology.dynamic_cp_sizes
    unique, inverse, counts = np.unique(lengths, return_inverse=True, return_counts=True)
    padded = [topology.at_cp_size(size).padded_seq_len(unique) for size in sizes]
    work = [_work(of_size, size=size, cost_model=cost_model) for of_size, size in zip(padded, sizes, strict=True)]
    num_samples = lengths.size if num_segments is None else num_segments.size
    # Upper bound: padding and communication grow with the size, and each sample may be a micro-batch by itself.
    most = sum(cost * count for cost, count in zip(work[-1].tolist(), counts.tolist(), strict=True))
    most += cost_model.per_microbatch * (num_samples + 1) * topology.num_leaves
    shift = max(0, most.bit_length() - (MAX_TOTAL_COST.bit_length() - 3))

    def on_each_rank(costs: NDArray[Any], size: int) -> NDArray[np.int64]:
        per_rank = np.where(costs > 0, np.maximum(-(-costs // size) >> shift, 1), 0).astype(np.int64)
        return sum_segments(per_rank[inverse], num_segments=num_segments)

    def tokens_of(tokens: NDArray[np.int64], size: int) -> NDArray[np.int64]:
        return -(-sum_segments(tokens[inverse], num_segments=num_segments) // size)

    per_microbatch = max(cost_model.per_microbatch >> shift, 1) if cost_model.per_microbatch else 0
    samples = SizedSamples(
        np.stack([on_each_rank(costs, size) for costs, size in zip(work, sizes, strict=True)]),
        tokens=np.stack([tokens_of(tokens, size) for tokens, size in zip(padded, sizes, strict=True)]),
        capacity=limits.max_tokens_per_gpu,
        per_microbatch=per_microbatch,
        num_leaves=topology.num_leaves,
    )
    return samples, shift


def _work(lengths: NDArray[np.int64], *, size: int, cost_model: CostModel) -> NDArray[Any]:
    """Exact unscaled cost of sequences over all ranks that share them: int64, or Python integers if too large.

    Args:
        lengths: `[num_lengths]` padded tokens.
        size: ranks that share a sequence.
        cost_model: cost of a sequence.
    """
    per_token = cost_model.linear + cost_model.expert_linear + cost_model.cp_exchange * (size - 1)
    longest = int(lengths.max(initial=0))
    highest = cost_model(longest) + per_token * longest + cost_model.per_sequence * size
    exact: NDArray[Any] = lengths if highest < MAX_TOTAL_COST else lengths.astype(object)
    squares = exact * exact
    cost = per_token * exact + cost_model.quadratic * squares + cost_model.per_sequence * size
    for window, coefficient in cost_model.windows:
        pairs = np.where(lengths > window, 2 * window * exact - window * (window - 1), squares)
        cost = cost + coefficient * pairs
    return cost
