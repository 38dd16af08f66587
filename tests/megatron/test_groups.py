"""The ranks of a model replica, in Megatron's own layouts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_balance.mcore.groups import is_first_of_replica, replica_ranks

WORLD_SIZE = 16


@pytest.fixture(autouse=True)
def no_groups_are_left() -> Iterator[None]:
    yield
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("tp", "pp", "cp", "order"),
    [
        *((tp, pp, cp, "tp-cp-ep-dp-pp") for tp, pp, cp in ((1, 1, 1), (2, 2, 2), (1, 4, 2), (4, 1, 2), (1, 1, 4))),
        *((tp, pp, 1, "tp-cp-ep-pp-dp") for tp, pp in ((1, 4), (2, 2))),  # Megatron refuses it with cp
    ],
)
def test_a_replica_is_the_ranks_of_one_data_parallel_rank(tp: int, pp: int, cp: int, order: str) -> None:
    of_data_rank: dict[int, list[int]] = {}
    found: dict[int, tuple[int, list[int]]] = {}
    firsts: list[int] = []
    for rank in range(WORLD_SIZE):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD_SIZE)
        parallel_state.initialize_model_parallel(
            tp, pp, context_parallel_size=cp, order=order, create_gloo_process_groups=False
        )
        data_rank = parallel_state.get_data_parallel_rank()
        of_data_rank.setdefault(data_rank, []).append(rank)
        found[rank] = data_rank, replica_ranks()
        if is_first_of_replica():
            firsts.append(rank)
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    for rank, (data_rank, ranks) in found.items():
        assert ranks == of_data_rank[data_rank], f"rank {rank}"
        assert len(ranks) == tp * pp * cp
    assert firsts == sorted(ranks[0] for ranks in of_data_rank.values())
