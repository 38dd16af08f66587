"""One step's data on one rank, without Megatron: what is pulled, what is handed on, what is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from megatron_balance import BalanceError, CostModel, Limits, Topology
from megatron_balance.mcore.arguments import BalanceConfig
from megatron_balance.mcore.balancer import BalancedStep, Groups, StepBalancer


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def balancer(group: dist.ProcessGroup, *, cap: int = 16) -> StepBalancer:
    return StepBalancer(
        BalanceConfig(use_dynamic_batch_size=True, max_tokens_per_gpu=cap, balance_data=True, balance_by_flops=True),
        topology=Topology(1),
        limits=Limits(cap),
        cost_model=CostModel(linear=10, quadratic=1),
        groups=Groups(dp_group=group, model_group=None),
        device=torch.device("cpu"),
    )


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


def test_a_step_is_packed_and_nothing_is_lost(group: dist.ProcessGroup) -> None:
    items = iter([item(7), item(3), item(9, 2), item(4), item(100)])
    step = balancer(group).balance(items, num_microbatches=4)
    assert isinstance(step, BalancedStep)
    assert step.num_microbatches == 2
    assert sum(step.microbatch_tokens) == 25
    assert max(step.microbatch_tokens) <= 16
    assert step.microbatches is not None
    spans = [tuple(microbatch["cu_seqlens"].diff()[0].tolist()) for microbatch in step.microbatches]
    assert sorted(length for span in spans for length in span) == [2, 3, 4, 7, 9]
    assert next(items)["tokens"].shape[1] == 100  # only this step's items were pulled


def test_data_without_cu_seqlens_is_handed_back_as_it_came(group: dist.ProcessGroup) -> None:
    fixed = [{"tokens": torch.ones(1, 8, dtype=torch.int64)} for _ in range(3)]
    assert balancer(group).balance(iter(fixed), num_microbatches=3) == fixed


def test_a_broken_item_is_named(group: dist.ProcessGroup) -> None:
    broken = item(7)
    broken["loss_mask"][0, 3] = float("nan")
    with pytest.raises(BalanceError, match=r"item 1 of this step: Row 0: loss_mask holds NaN"):
        balancer(group).balance(iter([item(3), broken]), num_microbatches=2)


def test_a_step_without_tokens_is_refused(group: dist.ProcessGroup) -> None:
    empty = {"tokens": torch.empty(1, 0, dtype=torch.int64), "cu_seqlens": torch.zeros(1, 1, dtype=torch.int32)}
    with pytest.raises(BalanceError, match="yielded no tokens"):
        balancer(group).balance(iter([empty]), num_microbatches=1)
