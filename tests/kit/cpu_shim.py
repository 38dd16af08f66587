"""Lets the real Megatron training loop run on a machine without a GPU; for trying things out and for tests.

`torchrun --nproc-per-node 2 tests/kit/cpu_shim.py SCRIPT ARGS` is `python -m megatron_balance.launch` there. `cuda`
means the CPU, process-wide, from before Megatron is imported. It changes no number.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
import types
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo, distributed_c10d
from torch.overrides import TorchFunctionMode

from megatron_balance.runtime.process import device_kind, set_device_kind


def enable_cpu() -> None:
    """Make `cuda` mean the CPU in this process. Idempotent. Call before Megatron is imported."""
    if device_kind() == "cpu":
        return
    set_device_kind("cpu")
    # Built later, dynamo's tables would find one stub under several names and raise "Duplicate torch object".
    import torch._dynamo.trace_rules

    torch._dynamo.trace_rules.get_torch_obj_rule_map()
    _stub_cuda()
    _stub_others()
    share_gloo_device()
    _CudaMeansCpu().__enter__()  # for the life of the process


def patch_megatron() -> None:
    """Replace the Megatron functions that cannot work without a GPU machine's tools, once it is imported."""
    import megatron.core.datasets.utils as dataset_utils
    import megatron.core.utils as core_utils
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller
    from megatron.core.tensor_parallel import inference_layers
    from thd_attention import thd_get_partitioned_indices

    for name in ("InferenceColumnParallelLinear", "InferenceLayerNormColumnParallelLinear"):
        # Mocks without Transformer Engine, and 0.20 asks isinstance of them where it makes a prediction depth.
        if not isinstance(getattr(inference_layers, name), type):
            setattr(inference_layers, name, type(name, (), {}))
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        # The wheel ships the compiled helpers but no Makefile to build them again.
        dataset_utils.compile_helpers = lambda: None
    PersistentAsyncCaller.async_loop = staticmethod(checkpoint_worker)  # type: ignore[method-assign]
    if core_utils.tex is None:  # Transformer Engine's extension, which splits a batch for context parallelism
        core_utils.tex = types.SimpleNamespace(thd_get_partitioned_indices=thd_get_partitioned_indices)


def checkpoint_worker(*arguments: Any) -> None:
    """The process that writes checkpoints under `--async-save`: spawned, it has no shim and Megatron is not patched.

    It would end at `rank % torch.cuda.device_count()`, and training would wait for it without end.
    """
    enable_cpu()
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    PersistentAsyncCaller.async_loop(*arguments)


@functools.cache
def share_gloo_device() -> None:
    """Let every group made from now on use one device: a thread that polls a hundred times a second.

    Fifty groups on eight ranks took a third of a core, idle.
    """
    if not hasattr(distributed_c10d, "_create_gloo_process_group"):  # torch before 2.13
        return

    @functools.cache
    def device() -> Any:
        interface = os.environ.get("GLOO_SOCKET_IFNAME")  # which the default device does not read
        gloo = ProcessGroupGloo
        return gloo.create_device(interface=interface) if interface else gloo.create_default_device()

    def create(group: Any, _options: object) -> ProcessGroupGloo:
        options = ProcessGroupGloo._Options()
        options._devices, options._threads, options._timeout = [device()], 2, group.timeout
        options.global_ranks_in_group, options.group_name = group.global_ranks_in_group, group.group_id
        return ProcessGroupGloo(group.store, group.group_rank, group.group_size, options)

    distributed_c10d._create_gloo_process_group = create  # before the first group registers it


class _CudaMeansCpu(TorchFunctionMode):
    """Rewrites the device of every torch call, and the type names that Megatron compares."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # clip_grads asserts that gradients are of type torch.cuda.FloatTensor.
            return func(args[0]).replace("torch.", "torch.cuda.", 1)
        if func is torch.tensor:
            kwargs.pop("pin_memory", None)
        if "device" in kwargs:
            kwargs["device"] = _as_cpu(kwargs["device"])
        if func is torch.Tensor.to:
            args = (args[0], *map(_as_cpu, args[1:]))
        elif func is torch.device:
            return torch.device("cpu") if args and _names_cuda(args[0]) else func(*args, **kwargs)
        return func(*args, **kwargs)


def _names_cuda(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (isinstance(value, str) and value.startswith("cuda"))


def _as_cpu(device: Any) -> Any:
    if _names_cuda(device) or (isinstance(device, torch.device) and device.type == "cuda"):
        return torch.device("cpu")
    return device


class _Stream:
    """A stream or an event: its work is always complete."""

    cuda_stream = 0
    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.wait_stream = self.wait_event = self.synchronize = self.record = self.wait = _nothing

    def record_event(self, event: Any = None) -> _Stream:
        return event or _Stream()

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _stub_cuda() -> None:
    torch.Tensor.record_stream = _nothing  # type: ignore[method-assign]  # it takes no other stream than torch's
    stream, generator = _Stream(), torch.default_generator
    properties = types.SimpleNamespace(
        name="cpu", major=0, minor=0, total_memory=0, multi_processor_count=1, warp_size=32
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": "cpu",
        "get_device_capability": (0, 0),
        "get_device_properties": properties,
        "current_stream": stream,
        "default_stream": stream,
        "mem_get_info": (0, 0),
        "memory_stats": defaultdict(int),
        "is_current_stream_capturing": False,
        "is_bf16_supported": True,
    }
    answers |= dict.fromkeys(["init", "_lazy_init", "set_device", "synchronize", "set_stream", "empty_cache"])
    answers |= dict.fromkeys(["ipc_collect", "reset_peak_memory_stats"])
    answers |= dict.fromkeys(["memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"], 0)
    # A function for each: torch.compile's tables tell torch's functions apart by identity.
    stubs: dict[str, Any] = {name: (lambda *_, _is=answer, **__: _is) for name, answer in answers.items()}
    stubs |= {
        "_lazy_call": lambda callback, **kwargs: callback(),
        "device": lambda device: contextlib.nullcontext(),
        "stream": lambda stream: contextlib.nullcontext(),
        "Stream": _Stream,
        "Event": type("_Event", (_Stream,), {}),
        # torch.manual_seed calls torch.cuda.manual_seed_all: seeding the CPU's generator from
        # there, by the generator's own method, ends the circle.
        "manual_seed": lambda seed: generator.manual_seed(int(seed)),
        "manual_seed_all": lambda seed: generator.manual_seed(int(seed)),
        "seed": lambda: generator.seed(),
        "initial_seed": lambda: generator.initial_seed(),
        "get_rng_state": lambda device=None: generator.get_state(),
        "set_rng_state": lambda state, device=None: generator.set_state(state),
        "default_generators": (generator,),
    }
    cuda = torch.cuda
    for name, stub in stubs.items():
        for module in (cuda, cuda.random, cuda.memory):
            if module is cuda or hasattr(module, name):
                setattr(module, name, stub)
    for name in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, name, lambda *args, **kwargs: None)


def _stub_others() -> None:
    # A function mode holds for the thread that entered it; data loaders pin in others, too.
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    empty = torch.empty
    torch.empty = lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs)
    torch.compile = lambda model=None, **_: model if model is not None else lambda function: function
    torch.optim.Optimizer._accelerator_graph_capture_health_check = lambda self: None  # type: ignore[method-assign]
    exchange, run = dist.all_to_all_single, torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    @functools.wraps(exchange)
    def all_to_all_single(*positional: Any, **keywords: Any) -> Any:
        # Megatron's MoE dispatcher turns split sizes into integers only where tensors are on a GPU.
        for name in ("output_split_sizes", "input_split_sizes"):
            if isinstance(keywords.get(name), torch.Tensor):
                keywords[name] = keywords[name].tolist()
        return exchange(*positional, **keywords)

    @functools.wraps(run)
    def run_backward(*positional: Any, **keywords: Any) -> Any:
        # backward() is called from within the mode's own handler, where the mode is off; recomputed layers need it.
        with _CudaMeansCpu():
            return run(*positional, **keywords)

    dist.all_to_all_single = all_to_all_single
    torch.autograd._engine_run_backward = run_backward  # type: ignore[attr-defined]


def _launch() -> None:
    from megatron_balance.launch import main
    from megatron_balance.mcore import install

    if len(sys.argv) > 1:  # Megatron may lie beside the script, as for the launcher
        sys.path.insert(0, str(Path(sys.argv[1]).resolve().parent))
    enable_cpu()
    install()
    patch_megatron()
    main()


if __name__ == "__main__":
    import cpu_shim  # a checkpoint's worker finds its function by the name of that module

    cpu_shim._launch()
