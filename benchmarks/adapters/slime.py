"""Compares slime's own schedule with the adapter's on the rollout batches of one setup; FLOPs by this package's model.

Qwen3-4B on 4 data-parallel ranks, micro-batches of at most 9216 tokens, 128 samples with lengths lognormal(7, 1)
clipped to 16..8192, drawn with Python's `random` from the seeds 0 to 49. With a checkout of slime, its own
`build_dp_schedule` with `--balance-by-flops` plans the same batches.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from megatron_balance import CostModel
from megatron_balance.adapters.slime import SlimeOptions, balanced_dp_schedule

NUM_SEEDS = 50
NUM_SAMPLES = 128
DP_SIZE = 4
CAP = 9216
"""Tokens of a micro-batch."""

BuildSchedule = Callable[..., Any]


def arguments() -> SimpleNamespace:
    return SimpleNamespace(
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=CAP,
        micro_batch_size=1,
        balance_data=True,
        balance_by_flops=True,
        hidden_size=2560,
        num_layers=36,
        num_attention_heads=32,
        group_query_attention=True,
        num_query_groups=8,
        kv_channels=128,
        ffn_hidden_size=9728,
        swiglu=True,
        vocab_size=151936,
        num_experts=None,
    )


def draw_lengths(seed: int) -> list[int]:
    """`[NUM_SAMPLES]` tokens of one rollout batch."""
    generator = random.Random(seed)
    return [int(min(8192, max(16, generator.lognormvariate(7, 1)))) for _ in range(NUM_SAMPLES)]


def figures_of(build: BuildSchedule, *, cost_model: CostModel) -> list[float]:
    """Plans all rollout batches with `build`, which has the signature of slime's `build_dp_schedule`."""
    config = {"dp_size": DP_SIZE, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    over_cap = 0
    ratios: list[tuple[float, float, int]] = []
    for seed in range(NUM_SEEDS):
        lengths = draw_lengths(seed)
        partitions, indices, (num_microbatches,), _ = build(
            arguments(), config, lengths, global_batch_size=NUM_SAMPLES, rollout_indices=list(range(NUM_SAMPLES))
        )
        lengths_held = [
            [[lengths[partition[index]] for index in slot] for slot in slots]
            for partition, slots in zip(partitions, indices, strict=True)
        ]
        over_cap += sum(sum(slot) > CAP and len(slot) > 1 for slots in lengths_held for slot in slots)
        costs = np.array([[sum(map(cost_model, slot)) for slot in slots] for slots in lengths_held], dtype=np.int64)
        mean = costs.sum() / DP_SIZE
        ratios.append((costs.sum(axis=1).max() / mean, costs.max(axis=0).sum() / mean, num_microbatches))
    means = np.array(ratios).mean(axis=0)
    return [over_cap, *means.tolist()]


def planners(checkout: Path | None) -> dict[str, BuildSchedule]:
    """The planners compared, by their names in the table."""
    builders: dict[str, BuildSchedule] = {}
    if checkout is not None:
        sys.path.insert(0, str(checkout))
        from slime.utils.dp_schedule import build_dp_schedule

        builders["slime --balance-by-flops"] = build_dp_schedule

    def adapter(options: SlimeOptions) -> BuildSchedule:
        return functools.partial(balanced_dp_schedule, _never, options, Counter[str]())

    builders["adapter"] = adapter(SlimeOptions())
    builders["adapter, objective=microbatch"] = adapter(SlimeOptions(objective="microbatch"))
    builders["adapter, cost=tokens"] = adapter(SlimeOptions(cost="tokens"))
    return builders


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Way → its figures, in the order of `COLUMNS`."""
    cost_model = SlimeOptions().cost_model(arguments())
    return {name: figures_of(build, cost_model=cost_model) for name, build in planners(args.checkout).items()}


COLUMNS = ["over the cap", "rank max/mean", "sum of slot max/mean", "micro-batches"]
SAYS = "Qwen3-4B on 4 ranks, cap 9216, 128 samples lognormal(7, 1): means over 50 rollout batches, by FLOPs."


def _never(*_: Any, **__: Any) -> None:
    raise AssertionError("every rollout batch here is balanced")
