"""The package's process groups, in Megatron's own layouts, and that every rank makes all of them.

It reads below the public names: a wrong group of ranks hangs a run, and does not say which ranks it held.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from torch.testing._internal.distributed.fake_pg import FakeStore
from training_run import search_path

from megatron_balance import BalanceError
from megatron_balance.mcore.setup.layout import refuse_bound_device

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


@pytest.fixture
def no_groups_are_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("layout", "ranks_per_node"),
    [
        pytest.param({"local_world_sizes": [2]}, 2, id="DP4-on-two-nodes"),
        pytest.param({"tp": 2, "local_world_sizes": [4]}, None, id="TP2-DP2-on-one-node"),
        pytest.param({"pp": 2, "local_world_sizes": [4, 2]}, None, id="PP2-DP2-nodes-not-alike"),
        pytest.param({"cp": 2, "local_world_sizes": [4]}, None, id="CP2-DP2"),
        pytest.param({"pp": 2, "order": "tp-cp-ep-pp-dp"}, None, id="PP2-DP2-other-order"),
    ],
)
def test_groups_are_those_of_megatron_and_later_ones_meet(layout: dict[str, Any], ranks_per_node: int | None) -> None:
    num_ranks = 4
    rows = run_ranks(num_ranks, "group_ranks:groups_of_rank", imports=(), **layout)
    readers = [rank for rank, row in enumerate(rows) if row["tensor_rank"] == 0]
    for rank, row in enumerate(rows):
        replica = [other for other, one in enumerate(rows) if one["data_rank"] == row["data_rank"]]
        assert row["data"] == (row["megatron_data"] if rank in readers else None)
        assert row["replica"] == (replica if len(replica) > 1 else None)
        assert row["readers"] == (readers if rank in readers else None)
        # One socket listens. Before 2.8 torch connects all ranks of a group when it is made.
        assert row["more_sockets"] == (1 if TORCH >= (2, 8) else num_ranks)
        assert row["leads"] == (rank == replica[0])
        assert row["later"] == ([0, num_ranks - 1] if rank in (0, num_ranks - 1) else None)
        assert row["ranks_per_node"] == ranks_per_node


@pytest.mark.usefixtures("no_groups_are_left")
@pytest.mark.parametrize(
    ("version", "bound", "refused"), [("2.14.1", True, True), ("2.15.0", True, False), ("2.9", False, False)]
)
def test_a_device_of_the_world_is_refused_where_gloo_groups_would_hang(
    monkeypatch: pytest.MonkeyPatch, version: str, bound: bool, refused: bool
) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    if bound:
        dist.distributed_c10d._get_default_group().bound_device_id = torch.device("cuda:0")
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(BalanceError, match="leave device_id out") if refused else contextlib.nullcontext():
        refuse_bound_device()


def test_groups_of_cpu_ranks_listen_on_the_interface_that_is_named() -> None:
    code = """import torch.distributed as dist
from cpu_shim import share_gloo_device
share_gloo_device()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)"""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "nowhere0", "PYTHONPATH": search_path()}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "nowhere0" in done.stderr
