"""R44: balance of AReaL's ranks, where AReaL is installed.

The setting is that of the pull request that asked for `balance_batch`: every row has a prompt of 1 to 511 tokens and an
answer of 1 to 2047, both uniform, and each rank has a padded batch. The
figure is its own, the coefficient of variation of tokens over ranks (standard deviation of the population over mean).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from megatron_balance.adapters.areal import balance_batch
from megatron_balance.cost.model import CostModel
from megatron_balance.cost.rates import resolve_cost

NUM_ROWS = 32
MAX_PROMPT_LEN, MAX_ANSWER_LEN = 512, 2048
"""Tokens that a prompt and an answer stay below."""

DP_SIZES = (4, 8, 16)

Split = Callable[[list[dict[str, torch.Tensor]], int], list[list[int]]]
"""Padded batches and ranks in, tokens of every row of each rank out."""


def draw_batches(seed: int, *, dp_size: int) -> list[dict[str, torch.Tensor]]:
    """`[dp_size]` batches, each padded to its own longest row; torch is deterministic over platforms here."""
    generator = torch.Generator().manual_seed(seed)
    batches: list[dict[str, torch.Tensor]] = []
    for _ in range(dp_size):
        size = (NUM_ROWS // dp_size,)
        lengths = torch.randint(1, MAX_PROMPT_LEN, size, generator=generator)
        lengths += torch.randint(1, MAX_ANSWER_LEN, size, generator=generator)
        batches.append({"attention_mask": torch.arange(int(lengths.max())) < lengths[:, None]})
    return batches


def lengths_of(batches: list[dict[str, torch.Tensor]]) -> list[list[int]]:
    return [batch["attention_mask"].sum(1).tolist() for batch in batches]


def adapters(**options: Any) -> Split:
    """`balance_batch` with these options."""
    return lambda batches, dp_size: lengths_of(balance_batch(batches, dp_size, **options))


def areals(name: str) -> Split:
    """A function of AReaL's own on the same rows: `greedy` of its controller, `ffd` and `kk` of its redistribution."""

    def split(batches: list[dict[str, torch.Tensor]], dp_size: int) -> list[list[int]]:
        from areal.utils import seqpack

        rows = [length for batch in lengths_of(batches) for length in batch]
        if name == "greedy":
            parts = seqpack.balanced_greedy_partition(rows, dp_size)
        else:
            parts = seqpack.get_allocate_fn(name)(rows, capacity=10**12, min_groups=dp_size)
        return [[rows[index] for index in part] for part in parts]

    return split


def mean_variation(split: Split, *, dp_size: int, cost_model: CostModel, num_seeds: int) -> float:
    """Of the ranks' costs: standard deviation over mean, mean over seeds."""
    batches = [split(draw_batches(seed, dp_size=dp_size), dp_size) for seed in range(num_seeds)]
    costs = np.array([[sum(map(cost_model, rows)) for rows in ranks] for ranks in batches], dtype=float)
    return float((costs.std(axis=1) / costs.mean(axis=1)).mean())


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Way → mean coefficient of variation of tokens at each number of ranks, then of FLOPs of Qwen3-8B."""
    tokens, flops = CostModel.tokens(), resolve_cost("flops", model="Qwen3-8B")
    splits: dict[str, Split] = {
        "as loaded": lambda batches, _: lengths_of(batches),
        "AReaL's controller (greedy)": areals("greedy"),
        "AReaL's kk": areals("kk"),
        "adapter": adapters(),
        "adapter, any number of sequences": adapters(equal_count=False),
        "adapter by FLOPs": adapters(cost_model=flops),
    }
    return {
        name: [
            mean_variation(split, dp_size=dp_size, cost_model=cost, num_seeds=args.seeds)
            for cost in (tokens, flops)
            for dp_size in DP_SIZES
        ]
        for name, split in splits.items()
    }


COLUMNS = [f"{unit}, DP{dp_size}" for unit in ("tokens", "FLOPs") for dp_size in DP_SIZES]
SAYS = "Coefficient of variation of the ranks' tokens, or FLOPs of Qwen3-8B; 32 sequences."
