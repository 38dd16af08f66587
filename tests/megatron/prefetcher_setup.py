"""One rank that balances, without Megatron: a prefetcher over a group of one, and items for it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import torch
import torch.distributed as dist

from megatron_balance import CostModel, Limits, Topology
from megatron_balance.mcore.lookahead.sample_pool import SamplePool
from megatron_balance.mcore.setup.arguments import BalanceConfig
from megatron_balance.mcore.step.balanced_step import BalancedStep
from megatron_balance.mcore.step.planner import StepPlanner
from megatron_balance.mcore.step.prefetcher import StepPrefetcher


@contextlib.contextmanager
def group_of_one() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def prefetcher(
    group: dist.ProcessGroup, *, cap: int = 16, lookahead: int = 1, batch_size: int = 2, unit: str = "segment"
) -> StepPrefetcher:
    config = BalanceConfig(
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=cap,
        balance_data=True,
        balance_by_flops=True,
        lookahead=lookahead,
        unit=unit,
    )
    topology, cost_model = Topology(1), CostModel(linear=10, quadratic=1)
    planner = StepPlanner(config, topology=topology, limits=Limits(cap), cost_model=cost_model, dp_group=group)
    pool = None
    if lookahead > 1:
        pool = SamplePool(
            lookahead, global_batch_size=batch_size, topology=topology, cost_model=cost_model, rank=group.rank()
        )
    return StepPrefetcher(planner, pool=pool)


def item(*lengths: int) -> dict[str, torch.Tensor]:
    total = sum(lengths)
    cu_seqlens = torch.tensor([[0, *torch.tensor(lengths).cumsum(0).tolist()]], dtype=torch.int32)
    tokens = torch.arange(1, total + 1).unsqueeze(0)
    return {
        "tokens": tokens,
        "labels": tokens + 1,
        "loss_mask": torch.ones(1, total),
        "cu_seqlens": cu_seqlens,
        "max_seqlen": torch.tensor([max(lengths)], dtype=torch.int32),
    }


class Replayed:
    """Like Megatron's RerunDataIterator: hands out items of what it iterates over, and again after a rewind."""

    def __init__(self, iterable: Iterator[object]) -> None:
        self.iterable = iterable
        self.saved: list[object] = []
        self.replaying = False

    def __next__(self) -> object:
        if self.replaying:
            return copy.copy(self.saved.pop(0))
        self.saved.append(next(self.iterable))
        return self.saved[-1]


def spans(step: BalancedStep) -> list[int]:
    assert step.microbatches is not None
    return sorted(span for microbatch in step.microbatches for span in microbatch["cu_seqlens"].diff()[0].tolist())
