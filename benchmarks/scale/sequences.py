"""CPU time of the thread that prepares steps, by the number of sequences that a rank loads, in packed rows.

The real planner on one of eight data-parallel ranks, with collectives that answer at once.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.scale.alone import answered
from benchmarks.scale.samples import planner_settings
from benchmarks.scale.stages import StageTimes
from megatron_balance.mcore.lookahead import Fetched
from megatron_balance.mcore.prepare import StepBuilder

SIZES = (128, 1024, 4096)
LIMIT_MS = 0.02
"""CPU milliseconds of splitting, checking and packing a sequence, at the largest size."""

_NUM_RANKS = 8
_NUM_ROWS = 16
_MEAN_TOKENS = 512
_NUM_STEPS = 7


@dataclass(frozen=True)
class SequenceTime:
    """CPU milliseconds of a step without messages, the median over steps."""

    num_sequences: int
    num_tokens: int
    cpu_ms: float
    exchange_cpu_ms: float  # of these, for samples that go to and come from other ranks

    @property
    def of_each(self) -> float:
        """Milliseconds a sequence, without the exchange."""
        return (self.cpu_ms - self.exchange_cpu_ms) / self.num_sequences


def measure_sequences() -> list[dict[str, float]]:
    """Of each of SIZES."""
    return [asdict(_measured(num_sequences)) for num_sequences in SIZES]


def _measured(num_sequences: int) -> SequenceTime:
    random = np.random.default_rng(0)
    lengths = random.integers(1, 2 * _MEAN_TOKENS, (_NUM_ROWS, num_sequences // _NUM_ROWS))
    lengths[:, -1] += lengths.sum(1).max() - lengths.sum(1)  # rows of one length
    items = [row_of(row) for row in lengths]
    rank_lengths = np.stack([lengths.ravel(), *random.integers(1, 2 * _MEAN_TOKENS, (_NUM_RANKS - 1, lengths.size))])
    times = StageTimes()
    dist.init_process_group("fake", rank=0, world_size=_NUM_RANKS, store=FakeStore())
    try:
        builder = StepBuilder(planner_settings(_NUM_RANKS), dp_group=dist.group.WORLD)
        for _ in range(_NUM_STEPS):
            with answered(rank_lengths), times.installed():
                builder.build(Fetched(items), num_items=len(items))
    finally:
        dist.destroy_process_group()
    messages = [step["exchange"][1] for step in times.steps[1:]]
    cpu, exchange = (
        statistics.median(
            step[stage][1] - message_seconds for step, message_seconds in zip(times.steps[1:], messages, strict=True)
        )
        for stage in ("all", "reroute")
    )
    return SequenceTime(num_sequences, int(lengths.sum()), 1e3 * cpu, 1e3 * exchange)


def row_of(lengths: np.ndarray) -> dict[str, Tensor]:
    """A row of Megatron's --sft: its starts are filled up to one entry a token."""
    total = int(lengths.sum())
    starts = torch.full((1, total + 1), total, dtype=torch.int32)
    starts[0, : len(lengths)] = torch.from_numpy(lengths).cumsum(0) - torch.from_numpy(lengths)
    tokens = torch.arange(total).unsqueeze(0) % 1000 + 5
    return {
        "tokens": tokens,
        "labels": tokens + 1,
        "loss_mask": torch.ones(1, total),
        "position_ids": torch.arange(total).unsqueeze(0),
        "cu_seqlens": starts,
        "max_seqlen": torch.tensor([int(lengths.max())], dtype=torch.int32),
    }
