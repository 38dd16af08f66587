"""The multiple of tokens that a run's FP8 or FP4 layers take, from Megatron's settings.

Sizes are tokens of a micro-batch on one rank, once context and sequence parallelism have split it. A rank quantizes its
own share before sequence parallelism gathers it, and weight gradients are GEMMs whose inner dimension is tokens.

| Recipe | Tokens | Because |
| --- | --- | --- |
| `delayed`, `tensorwise` | 16 | the leading dimension of FP8 GEMMs; the 8 that layers check holds for outputs only |
| `mxfp8` | 32 | a block of scales, without which nothing is quantized |
| `blockwise` | 128 | a block of scales: 16 would do for GEMMs, but then gathers are in high precision |
| `nvfp4` | 128 | kernels refuse other than multiples of 32, fuse at 64, and 128 is what Megatron pads experts to |

Source: Transformer Engine 2.3 to 2.20, common/gemm/cublaslt_gemm.cu, common/cast/nvfp4, pytorch/csrc/quantizer.cpp and
`is_quantizable` in pytorch/tensor; Megatron 0.17 to 0.19, `get_fp8_align_size`, `get_fp4_align_size`.

Megatron's experts pad their own tokens. Only where the routing is padded instead
(`--moe-router-padding-for-quantization`) does a rank need as many tokens as its fullest expert gets.
"""

from __future__ import annotations

import math
from typing import Any

from megatron_balance.errors import BalanceError

RECIPE_TOKENS = {"delayed": 16, "tensorwise": 16, "mxfp8": 32, "blockwise": 128, "nvfp4": 128}
"""By the name of `--fp8-recipe` or `--fp4-recipe`."""

FUSED_EXPERT_TOKENS = 256
"""Megatron's grouped GEMMs of fused operations take experts of a multiple of this many tokens."""


def token_alignment(settings: Any) -> int:
    """The alignment of a run, for `Topology.token_alignment`; 1 without FP8 and FP4.

    Args:
        settings: Megatron's arguments, or a TransformerConfig: they share these names.

    Raises:
        BalanceError: a recipe that is not known here, so that its kernels might refuse the packed sizes.
    """
    recipe = recipe_of(settings)
    if recipe is None:
        return 1
    if recipe not in RECIPE_TOKENS:
        flag = "--fp8-recipe" if settings.fp8 else "--fp4-recipe"
        raise BalanceError(
            f"{flag} is {recipe}, and the numbers of tokens that its kernels take are not known here: use one of "
            f"{', '.join(RECIPE_TOKENS)}, or train without balancing."
        )
    tokens = RECIPE_TOKENS[recipe]
    pads_routing = _is_set(settings, "moe_router_padding_for_quantization", "moe_router_padding_for_fp8")
    if pads_routing and _is_set(settings, "use_transformer_engine_op_fuser", "moe_use_grouped_tensor"):
        return math.lcm(tokens, FUSED_EXPERT_TOKENS)
    return tokens


def recipe_of(settings: Any) -> str | None:
    """Name of the recipe that linear layers run with, None without FP8 and FP4. Argument as above."""
    for precision in ("fp8", "fp4"):
        if getattr(settings, precision, None):
            recipe = getattr(settings, f"{precision}_recipe")
            return str(getattr(recipe, "value", recipe))
    return None


def _is_set(settings: Any, *names: str) -> bool:
    return any(bool(getattr(settings, name, False)) for name in names)
