"""The toy device finds what CUDA would refuse, counts what makes the host wait, and leaves the rest alone."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from toy_device import ToyDevice
from toy_placement import Memory, PlacementError, is_on_device, memory_of, put
from toy_transfers import SYNCHRONISATIONS, Kind, Phase, Place, excess, read_transfers

CUDA = "cuda"


@pytest.fixture
def device() -> Iterator[ToyDevice]:
    device = ToyDevice()
    with device.active():
        yield device


def counted(device: ToyDevice) -> dict[Kind, int]:
    found: dict[Kind, int] = {}
    for place, count in device.recorder.counts.items():
        found[place.kind] = found.get(place.kind, 0) + count
    return found


class TestPlacement:
    @pytest.mark.parametrize(
        "mix",
        [
            pytest.param(lambda host, there: there + host, id="add"),
            pytest.param(lambda host, there: host.add_(there), id="add-in-place"),
            pytest.param(lambda host, there: host @ there, id="matmul"),
            pytest.param(lambda host, there: torch.cat([host, there]), id="cat"),
            pytest.param(lambda host, there: torch.stack([host[0, 0], there[0, 0]]), id="stack-of-scalars"),
            pytest.param(lambda host, there: there.index_select(0, host[0].long()), id="index-select"),
            pytest.param(lambda host, there: host[there.long()], id="host-by-device-indices"),
            pytest.param(lambda host, there: host + there[0, 0], id="scalar-of-the-device"),
            pytest.param(lambda host, there: host[0, 0].add_(there[0, 0]), id="scalar-of-the-host-written"),
            pytest.param(lambda host, there: torch._foreach_add([there], [host]), id="foreach"),
            pytest.param(lambda host, there: torch.nn.functional.linear(host, there), id="linear"),
        ],
    )
    def test_operators_refuse_tensors_of_both(self, device: ToyDevice, mix: Callable[[Tensor, Tensor], Any]) -> None:
        host = torch.zeros(2, 2)
        with pytest.raises(PlacementError, match="tensors on host and device"):
            mix(host, torch.zeros(2, 2, device=CUDA))
        mix(host, host.clone())

    def test_scalars_of_the_host_mix(self, device: ToyDevice) -> None:
        there = torch.ones(2, device=CUDA)
        for result in (there * torch.tensor(2.0), torch._foreach_mul([there], torch.tensor(2.0))[0]):
            assert is_on_device(result)
            assert result.tolist() == [2.0, 2.0]

    def test_numpy_takes_tensors_of_the_host_only(self, device: ToyDevice) -> None:
        with pytest.raises(TypeError, match=r"use Tensor.cpu\(\) first"):
            torch.zeros(2, device=CUDA).numpy()
        assert torch.zeros(2).numpy().sum() == 0

    @pytest.mark.parametrize(
        ("takes_host", "message"), [(False, "tensors of the device got"), (True, "tensors of the host")]
    )
    def test_collectives(self, device: ToyDevice, takes_host: bool, message: str) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            if takes_host:
                device.host_groups.add(dist.group.WORLD.group_name)
            right, wrong = torch.ones(2), torch.ones(2, device=CUDA)
            if not takes_host:
                right, wrong = wrong, right
            dist.all_reduce(right)
            assert right.tolist() == [1.0, 1.0]
            with pytest.raises(PlacementError, match=message):
                dist.all_reduce(wrong)
        finally:
            dist.destroy_process_group()


class TestMemory:
    @pytest.mark.parametrize(
        "make",
        [
            pytest.param(lambda there: there.view(4), id="view"),
            pytest.param(lambda there: there[1].data, id="data"),
            pytest.param(lambda there: torch.zeros_like(there), id="like"),
            pytest.param(lambda there: there.new_zeros(3), id="new"),
            pytest.param(lambda there: there.new_tensor([1.0]), id="new-tensor"),
            pytest.param(lambda there: there.half().float(), id="dtype"),
            pytest.param(lambda there: there.to(torch.int64), id="to-dtype"),
            pytest.param(lambda there: torch.arange(3).to(there), id="to-another"),
            pytest.param(lambda there: copy.deepcopy(there), id="deepcopy"),
            pytest.param(lambda there: torch.nn.Parameter(there), id="parameter"),
            pytest.param(lambda there: torch.nn.Linear(2, 2).cuda().weight, id="module"),
            pytest.param(lambda there: torch.arange(3, device=there.device), id="factory"),
            pytest.param(lambda there: torch.as_tensor(there, device=CUDA), id="as-tensor"),
            pytest.param(lambda there: torch.zeros(2, device=0), id="number-of-the-device"),
        ],
    )
    def test_follows(self, device: ToyDevice, make: Callable[[Tensor], Tensor]) -> None:
        made = make(torch.zeros(2, 2, device=CUDA))
        assert is_on_device(made)
        assert (made.is_cuda, made.is_cpu, made.device, made.get_device()) == (True, False, torch.device(CUDA, 0), 0)
        assert made.type().startswith("torch.cuda.")

    def test_of_the_host_is_left_alone(self, device: ToyDevice) -> None:
        host = torch.zeros(2)
        assert (host.is_cuda, host.is_cpu, host.device.type, host.type()) == (False, True, "cpu", "torch.FloatTensor")
        assert not is_on_device(torch.zeros_like(torch.zeros(2, device=CUDA), device="cpu"))
        assert host.to("cpu") is host
        assert torch.zeros(2, device="meta").device.type == "meta"

    def test_parameters_in_a_flat_buffer(self, device: ToyDevice) -> None:
        buffer, gradients = torch.zeros(4, device=CUDA), torch.zeros(4, device=CUDA)
        weight = torch.nn.Parameter(torch.ones(2, 2))
        assert not is_on_device(weight)
        weight.data = buffer.view(2, 2).copy_(weight.data.cuda())
        weight.grad = gradients.view(2, 2)
        (torch.ones(2, device=CUDA) @ weight).sum().backward()
        torch.optim.AdamW([weight], lr=1.0).step()
        assert is_on_device(weight)
        assert gradients.tolist() == [1.0] * 4
        assert buffer.tolist() == weight.flatten().tolist() != [1.0] * 4

    def test_gradients_that_the_engine_makes(self, device: ToyDevice) -> None:
        weight = torch.randn(4, 3, device=CUDA, requires_grad=True)
        first, second = weight.index_select(0, torch.tensor([0, 2], device=CUDA)).split(1)
        first.sum().backward()
        assert is_on_device(weight.grad)
        assert second.requires_grad

    def test_a_thread_of_its_own(self, device: ToyDevice) -> None:
        there = torch.ones(2, device=CUDA)

        def work() -> None:
            with device.active():
                there.sum().item()

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        [place] = device.recorder.counts
        assert (place.phase, place.kind) == (Phase.THREAD, Kind.READ)


WAITS = {
    "item": (lambda there: there[0].item(), [Kind.READ]),
    "float": (lambda there: float(there[0]), [Kind.READ]),
    "bool": (lambda there: bool(there[0] > 0), [Kind.READ]),
    "index": (lambda there: [10, 20][there[0].long()], [Kind.READ]),
    "tolist": (lambda there: there.tolist(), [Kind.READ]),
    "equal": (lambda there: torch.equal(there, there), [Kind.READ]),
    "nonzero": (lambda there: there.nonzero(), [Kind.SHAPE]),
    "mask": (lambda there: there[there > 0], [Kind.SHAPE]),
    "unique": (lambda there: there.unique(), [Kind.SHAPE]),
    "repeat": (lambda there: there.repeat_interleave(there.long()), [Kind.SHAPE]),
    "cpu": (lambda there: there.cpu(), [Kind.TO_HOST]),
    "to-cpu": (lambda there: there.to("cpu"), [Kind.TO_HOST]),
    "copy-to-host": (lambda there: torch.zeros(2).copy_(there), [Kind.TO_HOST]),
    "cuda": (lambda there: torch.ones(2).cuda(), [Kind.PAGEABLE, Kind.BLOCKING]),
    "data": (lambda there: torch.tensor([1.0], device=CUDA), [Kind.PAGEABLE, Kind.BLOCKING]),
    "host-indices": (lambda there: there[torch.tensor([0])], [Kind.PAGEABLE, Kind.BLOCKING]),
    "copy": (lambda there: there.copy_(torch.ones(2)), [Kind.PAGEABLE, Kind.BLOCKING]),
    "non-blocking": (lambda there: torch.ones(2).cuda(non_blocking=True), [Kind.PAGEABLE]),
    "pinned": (lambda there: pinned(torch.ones(2)).cuda(non_blocking=True), [Kind.PINNED]),
    "to-pinned": (lambda there: pinned(torch.ones(2)).to(there.device, non_blocking=True), [Kind.PINNED]),
}
FREE = {
    "kernel": lambda there: there * 2 + there.sum(),
    "fill": lambda there: torch.zeros(3, device=CUDA),
    "moved-already": lambda there: there.cuda(),
    "index": lambda there: there[torch.zeros(1, dtype=torch.int64, device=CUDA)],
    "mask-filled": lambda there: there.masked_fill_(there > 0, 1.0),
    "one-value-for-a-mask": lambda there: there.__setitem__(there > 0, 1.0),
    "not-waited-for": lambda there: there.to("cpu", non_blocking=True),
    "of-the-host": lambda there: torch.ones(3).nonzero().sum().item(),
    "repeat-to-a-size": lambda there: there.repeat_interleave(there.long(), output_size=3),
}


def pinned(tensor: Tensor) -> Tensor:
    put(tensor, Memory.PINNED)
    assert tensor.is_pinned()
    return tensor


class TestTraffic:
    @pytest.mark.parametrize("name", WAITS)
    def test_is_counted_where_it_is_asked_for(self, device: ToyDevice, name: str) -> None:
        ask, kinds = WAITS[name]
        ask(torch.arange(1.0, 3.0, device=CUDA))
        assert counted(device) == dict.fromkeys(kinds, 1)
        sites = {(place.site, place.phase) for place in device.recorder.counts}
        assert sites == {("tests/megatron/test_toy_device.py:<lambda>", Phase.OUTSIDE)}

    @pytest.mark.parametrize("name", FREE)
    def test_nothing_else_is(self, device: ToyDevice, name: str) -> None:
        FREE[name](torch.arange(1.0, 3.0, device=CUDA))
        assert counted(device) == {}

    def test_copies_that_are_not_waited_for_are_pinned(self, device: ToyDevice) -> None:
        there = torch.ones(2, device=CUDA)
        assert memory_of(there.to("cpu", non_blocking=True)) is Memory.PINNED
        assert memory_of(there.cpu()) is Memory.PAGEABLE

    def test_the_inside_of_a_kernel_is_not(self, device: ToyDevice) -> None:
        there = torch.ones(2, device=CUDA)
        with device.recorder.kernel():
            assert not there.is_cuda
            assert is_on_device(torch.ones(2).to(there.device))
            there.tolist()
        assert there.is_cuda
        assert counted(device) == {}

    def test_is_written_and_read(self, device: ToyDevice, tmp_path: Any) -> None:
        torch.ones(2, device=CUDA).sum().item()
        device.recorder.write(tmp_path / "rank0.transfers.json")
        assert read_transfers(tmp_path, num_ranks=1) == [device.recorder.counts]


class TestExcess:
    @staticmethod
    def excess(ours: dict[int, int], stock: dict[int, int], *, kind: Kind = Kind.READ) -> list[str]:
        runs = [
            {Place(iteration, Phase.MICROBATCH, kind, "file.py:function"): n for iteration, n in counts.items()}
            for counts in (ours, stock)
        ]
        return excess(*runs, microbatches=[4, 3, 2], stock_microbatches=4)

    def test_a_site_of_every_micro_batch(self) -> None:
        assert self.excess({0: 100, 1: 6, 2: 4}, {1: 8, 2: 8}) == []
        assert self.excess({1: 7, 2: 4}, {1: 8, 2: 8}) == [
            f"step 2, micro-batch: {Kind.READ} 7 times, not 6, file.py:function"
        ]

    def test_a_site_of_every_step(self) -> None:
        assert self.excess({1: 2, 2: 2}, {1: 2, 2: 2}) == []
        assert len(self.excess({1: 3, 2: 3}, {1: 2, 2: 2})) == 2

    @pytest.mark.parametrize("kind", Kind)
    def test_a_new_site(self, kind: Kind) -> None:
        free = kind is Kind.PINNED
        assert len(self.excess({1: 1}, {}, kind=kind)) == (not free)
        assert free is (kind not in (*SYNCHRONISATIONS, Kind.PAGEABLE))
