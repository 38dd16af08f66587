"""The figures of `python -m benchmarks.adapters.slime`: Qwen3-4B, four ranks, 50 rollout batches."""

from __future__ import annotations

from benchmarks.adapters.slime import arguments, measure, planners
from megatron_balance.adapters.slime import SlimeOptions


def test_fifty_rollout_batches() -> None:
    """R33, R35, R36. slime with --balance-by-flops: 476 over the cap, 1.0169, 1.0758 (by its own FLOPs), 6.42."""
    figures = measure(planners(None)["adapter"], cost_model=SlimeOptions().cost_model(arguments()))
    assert figures.over_cap == 0
    assert figures.rank_max_over_mean <= 1.0005
    assert figures.slot_sum_over_mean <= 1.01
    assert figures.num_microbatches <= 6.46
