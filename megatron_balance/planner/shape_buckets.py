"""Micro-batches filled up to a few lengths (`--balance-shape-bucket`), so that few shapes occur.

An allocator reuses blocks of shapes that it has seen, and what is compiled or tuned for a shape serves again. The
price is the filler: half a bucket for each micro-batch on average.

Invariant: a filled micro-batch is never above the cap, which is rounded down to a multiple of the bucket; a sample
over the rounded cap runs alone and is not filled up.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError
from megatron_balance.planner.topology import Limits, Topology


def bucket_tokens(topology: Topology, *, shape_bucket: int) -> int:
    """What micro-batches are filled up to a multiple of, tokens over their context-parallel ranks; 1 for none.

    A multiple of what sequences are padded to, so that context and sequence parallelism can split it.

    Args:
        topology: the ranks.
        shape_bucket: tokens on each GPU.

    Raises:
        BalanceError: the bucket is below 1.

    Example:
        >>> bucket_tokens(Topology(8, cp_size=2), shape_bucket=128)
        256
    """
    if shape_bucket < 1:
        raise BalanceError(f"the shape bucket is {shape_bucket}: it must be 1 (off) or more tokens.")
    if shape_bucket == 1:
        return 1
    return math.lcm(shape_bucket * topology.cp_size, topology.token_multiple)


def bucketed_limits(limits: Limits, *, topology: Topology, shape_bucket: int, flag: str) -> Limits:
    """The limits, their cap rounded down to a multiple of the bucket.

    Args:
        limits: what a micro-batch holds.
        topology: the ranks.
        shape_bucket: tokens on each GPU.
        flag: that gave it, for the error.

    Raises:
        BalanceError: the bucket is larger than the cap.
    """
    cap, tokens = limits.max_tokens_per_gpu, bucket_tokens(topology, shape_bucket=shape_bucket)
    if tokens == 1 or cap is None:
        return limits
    bucket = tokens // topology.cp_size
    if bucket > cap:
        raise BalanceError(
            f"{flag} is {shape_bucket}, which is {bucket} tokens on these ranks, and --max-tokens-per-gpu {cap} holds "
            "no such bucket: lower it or raise the cap."
        )
    return Limits(cap // bucket * bucket)


def filled_tokens(
    tokens: NDArray[np.int64], *, topology: Topology, limits: Limits, shape_bucket: int
) -> NDArray[np.int64]:
    """Tokens of micro-batches once they are filled up. `[num_microbatches]` → `[num_microbatches]`

    Args:
        tokens: padded tokens.
        topology: the ranks.
        limits: as `bucketed_limits` gives them.
        shape_bucket: tokens on each GPU.
    """
    bucket = bucket_tokens(topology, shape_bucket=shape_bucket)
    filled = -(-tokens // bucket) * bucket
    cap = limits.max_tokens_per_microbatch(topology)
    return filled if cap is None else np.where(tokens > cap, tokens, filled)
