"""Real samples for ranks without a model: their lengths, and items as a loader of packed rows yields them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_balance.cost.model import CostModel
from megatron_balance.lengths import synthetic_lengths
from megatron_balance.mcore.setup.settings import RunCosts, Settings
from megatron_balance.model.shape import ModelShape
from megatron_balance.topology import Limits, Topology

LENGTH_SET = "reasoning_gym"
"""Answers of a reasoning model with their prompts; the only set that fills 10,000 ranks without repeating."""

CAP = 16_384
SAMPLES_PER_RANK = 16
MODEL = "Qwen2.5-0.5B"


@dataclass(frozen=True)
class Samples:
    num_ranks: int
    num_batches: int
    lengths_folder: Path | None

    def lengths(self) -> NDArray[np.int64]:
        """`[num_batches, num_ranks, SAMPLES_PER_RANK]`, tokens; samples above the cap are left out."""
        num_samples = self.num_batches * self.num_ranks * SAMPLES_PER_RANK
        if self.lengths_folder is None:
            drawn = synthetic_lengths(LENGTH_SET, num_samples=2 * num_samples, seed=0)
        else:
            drawn = np.load(self.lengths_folder / f"{LENGTH_SET}.npz")["length"]
        shuffled = np.random.default_rng(0).permutation(drawn[drawn <= CAP])
        return np.resize(shuffled, (self.num_batches, self.num_ranks, SAMPLES_PER_RANK)).astype(np.int64)


def item_of(length: int) -> dict[str, Tensor]:
    """One row of one sequence, with the keys and dtypes of Megatron's --sft rows."""
    tokens = torch.arange(length).unsqueeze(0)
    return {
        "tokens": tokens,
        "labels": tokens + 1,
        "loss_mask": torch.ones(1, length),
        "position_ids": tokens.clone(),
        "cu_seqlens": torch.tensor([[0, length]], dtype=torch.int32),
        "max_seqlen": torch.tensor([length], dtype=torch.int32),
    }


def planner_settings(num_ranks: int) -> Settings:
    """Ranks, cap and costs of a dense model that is balanced by FLOPs."""
    cost_model = CostModel.from_shape(ModelShape.preset(MODEL))
    return Settings(topology=Topology(num_ranks), limits=Limits(CAP), costs=RunCosts(cost_model))
