"""Measures the balance of AReaL's ranks: `python -m benchmarks.adapters.areal [--seeds 50]`, with AReaL installed.

The setting is that of the pull request that asked for `balance_batch`: every row has a prompt of 1 to 511 tokens and an
answer of 1 to max_answer_len - 1, both uniform, and each rank has a padded batch of `num_rows / dp_size` rows. The
figure is its own, the coefficient of variation of tokens over ranks (standard deviation of the population over mean).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.markdown import table, table_row
from megatron_balance.adapters.areal import balance_batch
from megatron_balance.cost.model import CostModel
from megatron_balance.cost.resolve import resolve_cost

SETTINGS = [(32, 2048), (32, 4096), (64, 4096)]
"""Rows of the global batch, and tokens that an answer stays below."""
MAX_PROMPT_LEN = 512
DP_SIZES = (4, 8, 16)

Split = Callable[[list[dict[str, torch.Tensor]], int], list[list[int]]]
"""Padded batches and ranks in, tokens of every row of each rank out."""


def draw_batches(seed: int, *, num_rows: int, max_answer_len: int, dp_size: int) -> list[dict[str, torch.Tensor]]:
    """`[dp_size]` batches, each padded to its own longest row; torch is deterministic over platforms here."""
    generator = torch.Generator().manual_seed(seed)
    batches: list[dict[str, torch.Tensor]] = []
    for _ in range(dp_size):
        size = (num_rows // dp_size,)
        lengths = torch.randint(1, MAX_PROMPT_LEN, size, generator=generator)
        lengths += torch.randint(1, max_answer_len, size, generator=generator)
        batches.append({"attention_mask": torch.arange(int(lengths.max())) < lengths[:, None]})
    return batches


def lengths_of(batches: list[dict[str, torch.Tensor]]) -> list[list[int]]:
    """Tokens of every row of each batch."""
    return [batch["attention_mask"].sum(1).tolist() for batch in batches]


def as_loaded(batches: list[dict[str, torch.Tensor]], dp_size: int) -> list[list[int]]:
    """Every rank keeps what it has."""
    return lengths_of(batches)


def ours(batches: list[dict[str, torch.Tensor]], dp_size: int) -> list[list[int]]:
    """`balance_batch` by tokens."""
    return lengths_of(balance_batch(batches, dp_size))


def ours_by_flops(batches: list[dict[str, torch.Tensor]], dp_size: int) -> list[list[int]]:
    """`balance_batch` by FLOPs of Qwen3-8B."""
    return lengths_of(balance_batch(batches, dp_size, model="Qwen3-8B"))


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


def coefficients_of_variation(
    split: Split, *, num_rows: int, max_answer_len: int, dp_size: int, cost_model: CostModel, num_seeds: int
) -> NDArray[np.float64]:
    """`[num_seeds]` of the ranks' costs."""
    found: list[float] = []
    for seed in range(num_seeds):
        batches = draw_batches(seed, num_rows=num_rows, max_answer_len=max_answer_len, dp_size=dp_size)
        costs = np.array([sum(map(cost_model, rows)) for rows in split(batches, dp_size)], dtype=float)
        found.append(float(costs.std() / costs.mean()))
    return np.array(found)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=50, help="batches that means are taken over")
    num_seeds = parser.parse_args().seeds
    splits: dict[str, Split] = {
        "as loaded": as_loaded,
        "AReaL greedy": areals("greedy"),
        "AReaL ffd": areals("ffd"),
        "AReaL kk": areals("kk"),
        "adapter, tokens": ours,
        "adapter, FLOPs": ours_by_flops,
    }
    columns = [(*setting, dp_size) for setting in SETTINGS for dp_size in DP_SIZES]
    for unit, cost_model in (
        ("tokens", CostModel.tokens()),
        ("FLOPs of Qwen3-8B", resolve_cost("flops", model="Qwen3-8B")),
    ):
        print(f"\nMean coefficient of variation of the ranks' {unit} over {num_seeds} batches\n")
        names = [f"{num_rows} rows to {longest}, dp {dp_size}" for num_rows, longest, dp_size in columns]
        print(table(" | ".join(["split", *names]), (), align="l" * (len(names) + 1)))
        for name, split in splits.items():
            means = [
                coefficients_of_variation(
                    split,
                    num_rows=num_rows,
                    max_answer_len=longest,
                    dp_size=dp_size,
                    cost_model=cost_model,
                    num_seeds=num_seeds,
                ).mean()
                for num_rows, longest, dp_size in columns
            ]
            print(table_row((name, *(f"{mean:.5f}" for mean in means))))


if __name__ == "__main__":
    main()
