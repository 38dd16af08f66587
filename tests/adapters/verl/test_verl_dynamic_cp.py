"""Our plans in verl's own dynamic context parallelism, which checks each one."""

import sys
import types
from collections import Counter

import pytest

pytest.importorskip("verl.protocol")

import torch
from tensordict import TensorDict
from verl.utils import dynamic_cp_scheduler as of_verl
from verl.utils import tensordict_utils

from megatron_balance import CostModel
from megatron_balance.adapters.verl import install
from megatron_balance.adapters.verl.dynamic_cp import with_exchange

CAP = 256
LENGTHS = [900, 512, 40, 16, 300, 77, 8, 123, 64, 200, 31, 250]


class Group:
    """A process group, as far as verl's scheduler asks."""

    def __init__(self, size: int, rank: int) -> None:
        self.size = lambda: size
        self.rank = lambda: rank


class MegatronsOwn:
    """In place of the class that Megatron-Core's dev branch has."""


@pytest.fixture
def dev(monkeypatch):
    """A Megatron-Core with dynamic context parallelism."""
    module = types.ModuleType("megatron.core.datasets.data_schedule")
    module.DefaultDynamicCPScheduler = MegatronsOwn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.core.datasets.data_schedule", module)


@pytest.fixture
def adapter(dev):
    adapter = install("Qwen3-8B")
    yield adapter
    adapter.undo()


def scheduled(lengths: list[int], *, dp_size: int, cp_size: int) -> list[list[tuple[list[int], int]]]:
    """For each rank, the sample ids and the size of its micro-batches, as verl hands them out."""
    rows = [torch.arange(length) for length in lengths]
    batch = TensorDict(
        {"input_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged), "row": torch.arange(len(rows))},
        batch_size=[len(rows)],
    )
    scheduler = of_verl.DynamicCPScheduler(CAP, dp_size, cp_size)
    num_ranks = dp_size * cp_size
    of_ranks = [scheduler.schedule(batch, Group(num_ranks, rank), tp_size=1) for rank in range(num_ranks)]
    return [
        [
            (of_slot["row"].tolist(), tensordict_utils.get_non_tensor_data(of_slot, "local_cp_size", None))
            for of_slot in slots
        ]
        for slots in of_ranks
    ]


@pytest.mark.parametrize(("dp_size", "cp_size"), [(2, 1), (2, 2), (4, 2), (3, 2)])
def test_verl_takes_our_plans(adapter, dp_size, cp_size):
    num_ranks = dp_size * cp_size
    lengths = [min(length, CAP * num_ranks) for length in LENGTHS]
    of_ranks = scheduled(lengths, dp_size=dp_size, cp_size=cp_size)
    assert len({len(slots) for slots in of_ranks}) == 1
    times = Counter()
    for slots in of_ranks:
        for ids, size in slots:
            assert sum(lengths[sample] for sample in ids) <= CAP * size
            times.update(dict.fromkeys(ids, 1 / size))
    assert set(times) == set(range(len(lengths)))
    assert all(count == pytest.approx(1) for count in times.values())  # a group of c ranks holds a row c times
    assert len({size for slots in of_ranks for _, size in slots}) > 1


def test_the_longest_row_takes_more_ranks_than_it_must(adapter):
    """900 tokens fit four ranks of 256; with nothing else to do all eight share them."""
    of_ranks = scheduled([900], dp_size=8, cp_size=1)
    assert of_ranks == [[([0], 8)]] * 8


def test_undone_the_scheduler_is_megatrons_again(dev):
    stock = of_verl.get_megatron_dynamic_cp_scheduler_cls
    adapter = install("Qwen3-8B")
    hook = of_verl.get_megatron_dynamic_cp_scheduler_cls
    assert hook is not stock
    assert hook() is not MegatronsOwn
    adapter.undo()
    assert of_verl.get_megatron_dynamic_cp_scheduler_cls is stock
    assert hook() is stock() is MegatronsOwn


def test_a_megatron_that_cannot_run_the_plan_is_refused_as_by_verl():
    adapter = install("Qwen3-8B")
    try:
        with pytest.raises(RuntimeError, match="Dynamic CP requires a Megatron-Core build"):
            of_verl.get_megatron_dynamic_cp_scheduler_cls()
    finally:
        adapter.undo()


def test_receiving_keys_and_values_costs_more_between_nodes():
    cost = CostModel(linear=1000, quadratic=1)
    assert with_exchange(cost, on_one_node=True).cp_exchange == 10
    assert with_exchange(cost, on_one_node=False).cp_exchange == 80
    known = CostModel(linear=1000, quadratic=1, cp_exchange=5)
    assert with_exchange(known, on_one_node=False) is known
