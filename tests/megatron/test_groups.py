"""The package's process groups, in Megatron's own layouts, and that every rank makes all of them.

It reads below the public names: a wrong group of ranks hangs a run, and does not say which ranks it held.
"""

import contextlib
import os
from datetime import timedelta
from types import MappingProxyType

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_balance import BalanceError
from megatron_balance.mcore.setup.layout import Layout, make_groups, refuse_bound_device

TIMEOUT = timedelta(seconds=60)


def groups_of_rank(*, tp=1, pp=1, cp=1, order="tp-cp-ep-dp-pp"):
    """Of this rank in a layout."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tp, pp, context_parallel_size=cp, order=order, create_gloo_process_groups=False
    )

    environment = os.environ
    os.environ = MappingProxyType(environment.copy())  # noqa: B003
    layout = Layout.from_parallel_state({}, timeout=TIMEOUT)
    data_ranks = layout.data_group(timeout=TIMEOUT, on_every_tensor_rank=False)
    replica = layout.replica_group(timeout=TIMEOUT)
    readers = layout.groups(lambda place: None if place.tp else 0)
    reader_ranks = make_groups(readers, timeout=TIMEOUT)
    os.environ = environment  # noqa: B003
    # As Megatron makes its own: a rank that had made fewer groups before would be waited for, or meet others.
    later = dist.new_group([0, dist.get_world_size() - 1], timeout=TIMEOUT)
    groups = {"data": data_ranks, "replica": replica, "readers": reader_ranks, "later": later}
    megatron_data = parallel_state.get_data_parallel_group()
    return {
        "data_rank": parallel_state.get_data_parallel_rank(),
        "tensor_rank": parallel_state.get_tensor_model_parallel_rank(),
        "stage": parallel_state.get_pipeline_model_parallel_rank(),
        "leads": layout.leads_replica(),
        "megatron_data": dist.get_process_group_ranks(megatron_data),
        **{name: _met(group) for name, group in groups.items()},
    }


def _met(group):
    """Its members, by its own all_gather; None for a rank that is none."""
    if not isinstance(group, dist.ProcessGroup):
        return None
    ranks = torch.empty(group.size(), dtype=torch.int64)
    dist.all_gather_into_tensor(ranks, torch.tensor([dist.get_rank()]), group=group)
    assert dist.get_process_group_ranks(group) == ranks.tolist()
    return ranks.tolist()


@pytest.fixture
def no_groups_are_left():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({}, id="DP4"),
        pytest.param({"tp": 2}, id="TP2-DP2"),
        pytest.param({"pp": 2}, id="PP2-DP2"),
        pytest.param({"cp": 2}, id="CP2-DP2"),
        pytest.param({"pp": 2, "order": "tp-cp-ep-pp-dp"}, id="PP2-DP2-other-order"),
    ],
)
def test_groups_are_those_of_megatron_and_later_ones_meet(layout):
    num_ranks = 4
    rows = run_ranks(num_ranks, "test_groups:groups_of_rank", imports=(), **layout)
    readers = [rank for rank, row in enumerate(rows) if row["tensor_rank"] == 0]
    for rank, row in enumerate(rows):
        replica = [second for second, first in enumerate(rows) if first["data_rank"] == row["data_rank"]]
        assert row["data"] == (row["megatron_data"] if rank in readers else None)
        assert row["replica"] == (replica if len(replica) > 1 else None)
        assert row["readers"] == (readers if rank in readers else None)
        assert row["leads"] == (rank == replica[0])
        assert row["later"] == ([0, num_ranks - 1] if rank in (0, num_ranks - 1) else None)


@pytest.mark.usefixtures("no_groups_are_left")
@pytest.mark.parametrize(
    ("version", "bound", "refused"), [("2.14.1", True, True), ("2.15.0", True, False), ("2.9", False, False)]
)
def test_a_device_of_the_world_is_refused_where_gloo_groups_would_hang(monkeypatch, version, bound, refused):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    if bound:
        dist.distributed_c10d._get_default_group().bound_device_id = torch.device("cuda:0")
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(BalanceError, match="leave device_id out") if refused else contextlib.nullcontext():
        refuse_bound_device()
