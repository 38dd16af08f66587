"""A device for tests, on the CPU: training on it shows what a GPU would refuse and what its host would wait for.

    run = forked_runs.train(folder, flags, num_ranks=2, module="toy_device")
    transfers = read_transfers(folder, num_ranks=2)      # toy_transfers.py

It makes "cuda" a memory of its own, on top of the shim that lets Megatron run on a CPU (devkit/cpu.py): tensors of host
and device may not be mixed (toy_placement.py), are moved by `.cuda()`, `.to()` and `.cpu()` and say where they are
(toy_tensors.py); what makes the host wait, and every copy to the device, is counted by call site (toy_transfers.py).
Kernels are torch's own for the CPU: numbers are those of a run without it, bit for bit.

Attention, and the split of a batch over context-parallel ranks, stand in for kernels of Transformer Engine: they run
their code for a CPU, and their inside is not counted.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves
from toy_placement import Memory, PlacementError, PlacementMode, is_on_device, memory_of, put
from toy_tensors import CUDA, DeviceMode
from toy_transfers import Kind, Recorder


def main() -> None:
    """The program of a rank: tests/kit/record_steps.py on the toy device."""
    import record_steps

    enable(Path(sys.argv[1]))
    record_steps.main()


def enable(record: Path) -> ToyDevice:
    """Have this process train on the toy device, to its end. Call after the shim, before training.

    Args:
        record: folder for rankN.transfers.json, written when the process ends.
    """
    device = ToyDevice()
    for mode in device.modes():
        mode.__enter__()
    _enter_in_threads(device)
    _enter_in_backward(device)
    _stub_cuda(device.recorder)
    _stub_pinned_memory()
    _stub_distributed(device)
    _stub_megatron(device.recorder)
    atexit.register(device.recorder.write, record / f"rank{os.environ['RANK']}.transfers.json")
    return device


class ToyDevice:
    """The toy device of one process.

    Attributes:
        recorder: counts its traffic.
        host_groups: names of the process groups that take tensors of the host.
    """

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.host_groups: set[str] = set()
        self._of_thread = threading.local()

    def placement(self) -> PlacementMode:
        """The mode that checks the operators of this thread."""
        if not hasattr(self._of_thread, "placement"):
            self._of_thread.placement = PlacementMode(self.recorder, host_groups=self.host_groups)
        return self._of_thread.placement

    def modes(self) -> tuple[PlacementMode, DeviceMode]:
        """Entered in this order, they bring the device to this thread."""
        return self.placement(), DeviceMode(self.placement())

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """The device is there in this thread."""
        placement, functions = self.modes()
        with placement, functions:
            yield


def _enter_in_threads(device: ToyDevice) -> None:
    run = threading.Thread.run

    @functools.wraps(run)
    def run_on_device(self: threading.Thread) -> None:
        with device.active():
            run(self)

    threading.Thread.run = run_on_device  # type: ignore[method-assign]


def _enter_in_backward(device: ToyDevice) -> None:
    # The shim enters its own mode, which would be asked first: take the engine's function from below it.
    inner = torch.autograd._engine_run_backward.__wrapped__  # type: ignore[attr-defined]

    @functools.wraps(inner)
    def run_backward(*positional: Any, **keywords: Any) -> Any:
        # backward() is called from within a mode's own handler, where that mode is off.
        placement, functions = device.modes()
        with placement.call(None), functions:
            return inner(*positional, **keywords)

    torch.autograd._engine_run_backward = run_backward  # type: ignore[attr-defined]


def _stub_cuda(recorder: Recorder) -> None:
    class Stream(torch.cuda.Stream):  # type: ignore[misc, valid-type]
        def synchronize(self) -> None:
            recorder.count(Kind.WAIT)

        def record_event(self, event: Any = None) -> Any:
            event = event or Event()
            event.record()
            return event

    class Event(torch.cuda.Event):  # type: ignore[misc, valid-type]
        """On a device that has always finished."""

        _at: float | None = None

        def record(self, *_: Any) -> None:
            self._at = time.perf_counter()

        def synchronize(self) -> None:
            recorder.count(Kind.WAIT)

        def elapsed_time(self, other: Any) -> float:
            return (other._at - self._at) * 1e3

    stream = Stream()
    torch.cuda.Stream, torch.cuda.Event = Stream, Event  # type: ignore[misc, assignment]
    torch.cuda.current_stream = torch.cuda.default_stream = lambda device=None: stream  # type: ignore[assignment]
    torch.cuda.synchronize = lambda device=None: recorder.count(Kind.WAIT)
    # C++ would refuse the stub of a stream before any mode is asked.
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign]


def _stub_pinned_memory() -> None:
    def pin_memory(self: Tensor, *_: Any) -> Tensor:
        if is_on_device(self):
            raise RuntimeError("cannot pin a tensor of the toy device: only dense CPU tensors can be pinned")
        if memory_of(self) is Memory.PINNED:
            return self
        pinned = self.clone()
        put(pinned, Memory.PINNED)
        return pinned

    torch.Tensor.pin_memory = pin_memory  # type: ignore[method-assign]
    # Data loaders pin where there is one.
    torch.accelerator.is_available = lambda: True
    torch.accelerator.current_accelerator = lambda check_available=False: CUDA  # type: ignore[assignment]


def _stub_distributed(device: ToyDevice) -> None:
    inner = dist.new_group

    @functools.wraps(inner)
    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *rest: Any, **keywords: Any) -> Any:
        if backend == "nccl":  # the default backend stands in: its groups take tensors of the device
            backend = None
        group = inner(ranks, timeout, backend, *rest, **keywords)
        if backend == "gloo" and isinstance(group, dist.ProcessGroup):
            device.host_groups.add(group.group_name)
        return group

    def device_of_objects(group: Any = None) -> str:
        return "cpu" if (group or dist.group.WORLD).group_name in device.host_groups else "cuda"

    dist.init_process_group = _over_gloo(dist.init_process_group)
    dist.new_group = dist.distributed_c10d.new_group = new_group
    dist.distributed_c10d._get_object_coll_device = device_of_objects


def _over_gloo(init_process_group: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(init_process_group)
    def init(backend: str | None = None, *rest: Any, **keywords: Any) -> Any:
        return init_process_group("gloo" if backend == "nccl" else backend, *rest, **keywords)

    return init


def _stub_megatron(recorder: Recorder) -> None:
    import megatron.core.utils as core_utils
    from megatron.core.models.gpt.gpt_model import GPTModel

    from megatron_balance.mcore.thd import attention
    from megatron_balance.runtime.environment import set_device_kind

    def as_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def kernel(*positional: Any, **keywords: Any) -> Any:
            with recorder.kernel():
                return function(*positional, **keywords)

        return kernel

    attention.ThdAttention.forward = as_kernel(attention.ThdAttention.forward)  # type: ignore[method-assign]
    core_utils.tex.thd_get_partitioned_indices = as_kernel(core_utils.tex.thd_get_partitioned_indices)
    GPTModel.forward = _with_inputs_checked(GPTModel.forward)  # type: ignore[method-assign]
    set_device_kind("cuda")  # the package takes it for a GPU: times by events, pins


def _with_inputs_checked(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def checked(self: Any, *positional: Any, **keywords: Any) -> Any:
        packed = keywords.get("packed_seq_params")
        for tensor in tree_leaves((positional, keywords, {} if packed is None else vars(packed))):
            if isinstance(tensor, Tensor) and not is_on_device(tensor):
                raise PlacementError(f"the model got a tensor of the host: {tuple(tensor.shape)}, {tensor.dtype}")
        return forward(self, *positional, **keywords)

    return checked
