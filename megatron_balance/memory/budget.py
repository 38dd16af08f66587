"""The memory budget of a run on a GPU, and the token cap that follows from it.

A given budget covers what the memory model counts. Of a device's whole memory, a reserve is kept for the rest: the CUDA
context, communication buffers, kernels' workspaces, and memory that the allocator cannot use because micro-batches
differ in length (`--balance-shape-bucket` reduces the number of shapes).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_balance.errors import BalanceError
from megatron_balance.memory.model import GIB, MemoryModel
from megatron_balance.memory.shape_buckets import bucket_tokens
from megatron_balance.topology import Topology

AUTO = "auto"
"""`--max-tokens-per-gpu auto`."""

TOKEN_STEP = 128
"""A derived cap is a multiple of this: GEMMs run best on such shapes."""

MIN_RESERVE_BYTES = 2 * GIB
RESERVE_SHARE = 0.1


def gib_to_bytes(gib: float, *, flag: str) -> int:
    """A budget in bytes.

    Args:
        gib: GiB.
        flag: that gave it, for the error.

    Raises:
        BalanceError: it is not a positive number.
    """
    if not (math.isfinite(gib) and gib > 0):
        raise BalanceError(f"{flag} is {gib}: it must be a positive number of GiB.")
    return int(gib * GIB)


def budget_of_device(total_bytes: int) -> int:
    """Memory that a run may use on a device: all but a tenth, and all but 2 GiB at least.

    Example:
        >>> budget_of_device(80 * GIB) // GIB
        72
    """
    return max(total_bytes - max(int(total_bytes * RESERVE_SHARE), MIN_RESERVE_BYTES), 0)


@dataclass(frozen=True, kw_only=True)
class DerivedCap:
    """A cap that fits a budget.

    Attributes:
        tokens: of a micro-batch on one GPU.
        budget_bytes: memory that the run may take.
        static_bytes: weights, gradients and optimizer of the stage that limits the cap.
        bytes_per_token: of that stage.
        stage: number of that stage, from 0.
        held_at: the reason why the cap is lower than what fits; empty where it is not.
    """

    tokens: int
    budget_bytes: int
    static_bytes: int
    bytes_per_token: int
    stage: int
    held_at: str = ""

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens: {self.budget_bytes / GIB:.1f} GiB of memory, {self.static_bytes / GIB:.1f} GiB of "
            f"weights, gradients and optimizer, {self.bytes_per_token:,} bytes a token (pipeline stage {self.stage})"
            f"{self.held_at}"
        )


def derive_cap(
    model: MemoryModel,
    *,
    budget_bytes: int,
    topology: Topology,
    shape_bucket: int = 1,
    seq_length: int | None = None,
) -> DerivedCap:
    """The largest number of tokens of a micro-batch on one GPU that fits the budget.

    In a pipeline the cap is at most the longest sample (`seq_length`). More may fit, but larger micro-batches are fewer
    and lengthen the bubble, so plans gain nothing.

    Args:
        model: memory of the run.
        budget_bytes: memory that it may take.
        topology: the ranks.
        shape_bucket: `--balance-shape-bucket`: the cap is a multiple of this too.
        seq_length: `--seq-length`, the longest possible sample; None where it is not known.

    Raises:
        BalanceError: nothing fits; names the terms that take the budget and what lowers them.
    """
    multiple = math.lcm(TOKEN_STEP, bucket_tokens(topology, shape_bucket=shape_bucket) // topology.cp_size)
    fit = model.max_tokens_per_gpu(budget_bytes, multiple=multiple)
    limiting = min(model.stages, key=lambda stage: (budget_bytes - stage.static_bytes) / stage.bytes_per_token)
    if fit == 0:
        raise BalanceError(
            f"--max-tokens-per-gpu is {AUTO}, and not even {multiple} tokens fit: of a budget of "
            f"{budget_bytes / GIB:.2f} GiB weights, gradients and optimizer take {limiting.static_bytes / GIB:.2f} GiB "
            f"and {multiple} tokens {multiple * limiting.bytes_per_token / GIB:.2f} GiB (estimates, pipeline stage "
            f"{limiting.stage}). Share them (--use-distributed-optimizer, more tensor or pipeline stages), keep less "
            "(--recompute-granularity full), or give the cap in tokens."
        )
    tokens, held_at = fit, ""
    if topology.pp_size > 1 and seq_length is not None:
        longest = -(-seq_length // (topology.cp_size * multiple)) * multiple
        if longest < fit:
            tokens, held_at = longest, f"; {fit} would fit, but larger micro-batches lengthen the pipeline's bubble"
    return DerivedCap(
        tokens=tokens,
        budget_bytes=budget_bytes,
        static_bytes=limiting.static_bytes,
        bytes_per_token=limiting.bytes_per_token,
        stage=limiting.stage,
        held_at=held_at,
    )
