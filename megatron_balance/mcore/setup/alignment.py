"""Multiples of tokens that micro-batches are filled up to, for low-precision layers and for fewer shapes.

`Topology.token_alignment` applies to every micro-batch, `--balance-shape-bucket` to those up to the cap, which is
rounded down to the multiple: a sample over the rounded cap runs alone and is filled up to the alignment only. Both
count tokens of a rank, once context and sequence parallelism have split the micro-batch.

docs/megatron.md has the alignment of each recipe. Sources: Transformer Engine 2.3 to 2.20,
common/gemm/cublaslt_gemm.cu, common/cast/nvfp4, pytorch/csrc/quantizer.cpp and `is_quantizable` in pytorch/tensor;
Megatron 0.17 to 0.19, `get_fp8_align_size`, `get_fp4_align_size`. Experts pad their own tokens; only where routing is
padded instead does a rank need as many tokens as its fullest expert gets.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError
from megatron_balance.mcore.options import Options
from megatron_balance.topology import Limits, Topology

DUMMY_TOKENS = 128
"""Tokens of a dummy on each of its context-parallel ranks, at least, where the cap allows."""

RECIPE_TOKENS = {"delayed": 16, "tensorwise": 16, "mxfp8": 32, "blockwise": 128, "nvfp4": 128}
"""By the name of `--fp8-recipe` or `--fp4-recipe`."""

FUSED_EXPERT_TOKENS = 256
"""Megatron's grouped GEMMs of fused operations take experts of a multiple of this many tokens."""


def token_alignment(options: Options) -> int:
    """The alignment of a run, for `Topology.token_alignment`; 1 without FP8 and FP4. Other recipes are refused."""
    precision = next((name for name in ("fp8", "fp4") if options.get(name)), None)
    if precision is None:
        return 1
    recipe = options[f"{precision}_recipe"]
    tokens = RECIPE_TOKENS[str(getattr(recipe, "value", recipe))]
    pads_routing = ("moe_router_padding_for_quantization", "moe_router_padding_for_fp8")
    fuses = ("use_transformer_engine_op_fuser", "moe_use_grouped_tensor")
    if all(any(map(options.get, names)) for names in (pads_routing, fuses)):
        return math.lcm(tokens, FUSED_EXPERT_TOKENS)
    return tokens


def bucket_tokens(topology: Topology, *, shape_bucket: int) -> int:
    """The multiple that micro-batches up to the cap are filled up to, over context-parallel ranks; 1 for none."""
    # Every context- and sequence-parallel rank gets an aligned share; the bucket is of each GPU before both.
    multiple = topology.pack_multiple
    return -(-shape_bucket * topology.cp_size // multiple) * multiple


def bucketed_limits(max_tokens_per_gpu: int, *, topology: Topology, shape_bucket: int) -> Limits:
    """Limits with the cap rounded down to the multiple that micro-batches are filled up to; else BalanceError."""
    tokens = bucket_tokens(topology, shape_bucket=shape_bucket)
    if tokens == topology.token_multiple:
        return Limits(max_tokens_per_gpu)
    bucket = tokens // topology.cp_size
    if bucket > max_tokens_per_gpu:
        given = f"--balance-shape-bucket is {shape_bucket}" if shape_bucket > 1 else "no shape bucket is set"
        raise BalanceError(
            f"micro-batches are filled up to multiples of {bucket} tokens on these ranks ({given}, the precision's "
            f"alignment is {topology.token_alignment} tokens a rank), and --max-tokens-per-gpu {max_tokens_per_gpu} "
            "holds none: raise the cap or lower the bucket."
        )
    return Limits(max_tokens_per_gpu // bucket * bucket)


def filled_tokens(
    tokens: NDArray[np.int64], *, topology: Topology, limits: Limits, shape_bucket: int
) -> NDArray[np.int64]:
    """Padded tokens of micro-batches, 0 for a dummy, once filled up. `[num_microbatches]` → `[num_microbatches]`

    Limits are those of `bucketed_limits`.
    """
    cap = limits.max_tokens_per_microbatch(topology)
    multiple = np.full(len(tokens), bucket_tokens(topology, shape_bucket=shape_bucket))
    if cap is not None:
        multiple[tokens > cap] = topology.pack_multiple
    filled = -(-tokens // multiple) * multiple
    # A dummy of a few tokens is a shape of its own to compiled kernels, and one token is an edge case of many.
    room = DUMMY_TOKENS * topology.cp_size if cap is None else min(DUMMY_TOKENS * topology.cp_size, cap)
    dummy = max(-(-room // topology.pack_multiple), 1) * topology.pack_multiple
    return np.where(tokens == 0, dummy, filled)
