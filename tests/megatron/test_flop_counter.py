"""Our FLOPs against torch's own count of what a real GPTModel computes, its shape read from its configuration.

torch's FlopCounterMode sees every GEMM of a forward pass, and all of a score matrix; ours counts the causal half of it.
So of `a*L + b*L²`, solved from two lengths, torch's `a` is ours, and its `b` is twice ours.
"""

from __future__ import annotations

import pytest
from forked import train

LENGTHS = (32, 96)
MODELS = [
    "dense",
    "grouped queries, output gate",
    "experts in every second layer",
    "latent attention",
    "latent attention without q-LoRA, experts",
    "multi-token prediction",
]


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[int]]]:
    return train(tmp_path_factory.mktemp("counts"), [], num_ranks=1, module="flop_counts").ranks[0][0]


def linear_and_quadratic(counts: list[int]) -> tuple[float, float]:
    (short, of_short), (long, of_long) = zip(LENGTHS, counts, strict=True)
    quadratic = (of_long / long - of_short / short) / (long - short)
    return of_short / short - quadratic * short, quadratic


@pytest.mark.parametrize("model", MODELS)
def test_torch_counts_the_same(counted: dict[str, dict[str, list[int]]], model: str) -> None:
    linear, quadratic = linear_and_quadratic(counted[model]["torch"])
    assert linear_and_quadratic(counted[model]["ours"]) == pytest.approx((linear, quadratic / 2), rel=1e-9)
