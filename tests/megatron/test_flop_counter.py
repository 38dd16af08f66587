"""Our FLOPs against torch's own count of what a real GPTModel computes, its shape read from its configuration.

torch's FlopCounterMode sees every GEMM of a forward pass, and all of a score matrix; ours counts the causal half of it.
So of `a*L + b*L²`, solved from two lengths, torch's `a` is ours, and its `b` is twice ours.
"""

from __future__ import annotations

import pytest
from gloo_ranks import run_ranks

LENGTHS = (32, 96)


def linear_and_quadratic(counts: list[int]) -> tuple[float, float]:
    (short, of_short), (long, of_long) = zip(LENGTHS, counts, strict=True)
    quadratic = (of_long / long - of_short / short) / (long - short)
    return of_short / short - quadratic * short, quadratic


def test_torch_counts_the_same() -> None:
    (counted,) = run_ranks(1, "flop_counts:counts_of_models", imports=())
    for model, counts in counted.items():
        linear, quadratic = linear_and_quadratic(counts["torch"])
        assert linear_and_quadratic(counts["ours"]) == pytest.approx((linear, quadratic / 2), rel=1e-9), model
