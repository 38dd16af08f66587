"""A shim that lets the real Megatron training loop run on a machine without a GPU.

For trying things out and for tests: it makes `cuda` mean the CPU, process-wide, before Megatron is
imported. It is never active unless asked for (`cpu_launch.py`), and it
changes no number: kernels are torch's own CPU kernels, collectives go through gloo.

What it does, in this order:

1. lets torch._dynamo build its tables of torch.cuda functions while they are still distinct;
2. maps the device `cuda`, integer devices and `.cuda()` to the CPU by a TorchFunctionMode;
3. stubs the parts of `torch.cuda` that ask a driver (streams, events, memory, random states);
4. makes `torch.compile` the identity, and drops checks that only know CUDA.

Fixes that need Megatron's modules wait in `patch_megatron()`, to be called once it is imported.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from gloo_device import share_gloo_device
from torch.overrides import TorchFunctionMode

from megatron_balance.runtime.process import device_kind, set_device_kind


def enable_cpu() -> None:
    """Make `cuda` mean the CPU in this process. Idempotent. Call before Megatron is imported."""
    if device_kind() == "cpu":
        return
    set_device_kind("cpu")
    _build_dynamo_tables()
    _stub_cuda()
    _stub_compile()
    _stub_distributed()
    _stub_backward()
    mode = _CudaMeansCpu()
    mode.__enter__()  # for the life of the process


def patch_megatron() -> None:
    """Replace the Megatron functions that cannot work without a GPU machine's tools."""
    import megatron.core.datasets.utils as dataset_utils
    import megatron.core.utils as core_utils
    from thd_attention import thd_get_partitioned_indices

    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        # The wheel ships the compiled helpers but no Makefile to build them again.
        dataset_utils.compile_helpers = lambda: None
    _patch_checkpoint_worker()
    if core_utils.tex is None:  # Transformer Engine's extension, which splits a batch for context parallelism
        core_utils.tex = types.SimpleNamespace(thd_get_partitioned_indices=thd_get_partitioned_indices)


def _patch_checkpoint_worker() -> None:
    """Give the process that writes checkpoints under `--async-save` the shim: a spawned process has none.

    It would end at `rank % torch.cuda.device_count()`, and training would wait for it without end.
    """
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    PersistentAsyncCaller.async_loop = staticmethod(checkpoint_worker)  # type: ignore[method-assign]


def checkpoint_worker(*arguments: Any) -> None:
    """`PersistentAsyncCaller.async_loop` in a spawned process, where Megatron is not patched."""
    enable_cpu()
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    PersistentAsyncCaller.async_loop(*arguments)


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
        if func is torch.Tensor.record_stream:
            return None
        if "device" in kwargs:
            kwargs["device"] = _as_cpu(kwargs["device"])
        if func is torch.Tensor.to:
            args = (args[0], *(_as_cpu(arg) if _is_device(arg) else arg for arg in args[1:]))
        elif func is torch.device:
            return torch.device("cpu") if args and _names_cuda(args[0]) else func(*args, **kwargs)
        return func(*args, **kwargs)


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device) or _names_cuda(value)


def _names_cuda(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (isinstance(value, str) and value.startswith("cuda"))


def _as_cpu(device: Any) -> Any:
    if _names_cuda(device) or (isinstance(device, torch.device) and device.type == "cuda"):
        return torch.device("cpu")
    return device


def _build_dynamo_tables() -> None:
    # Built later, they would find one stub under several names and raise "Duplicate torch object".
    import torch._dynamo
    import torch._dynamo.trace_rules

    torch._dynamo.trace_rules.get_torch_obj_rule_map()


class _Stream:
    """A stream whose work is always complete."""

    cuda_stream = 0
    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record_event(self, event: Any = None) -> _Event:
        return event or _Event()

    def query(self) -> bool:
        return True


class _Event:
    """An event that is always complete."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass

    def wait(self, *args: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


def _stub_cuda() -> None:
    cuda = torch.cuda
    stream = _Stream()
    properties = types.SimpleNamespace(
        name="cpu", major=0, minor=0, total_memory=0, multi_processor_count=1, warp_size=32
    )
    stubs: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_lazy_call": lambda callback, **kwargs: callback(),
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_name": lambda device=None: "cpu",
        "get_device_capability": lambda device=None: (0, 0),
        "get_device_properties": lambda device=None: properties,
        "device": lambda device: contextlib.nullcontext(),
        "synchronize": lambda device=None: None,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "set_stream": lambda stream: None,
        "stream": lambda stream: contextlib.nullcontext(),
        "Stream": _Stream,
        "Event": _Event,
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "max_memory_reserved": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "memory_stats": lambda device=None: _ZeroStats(),
        "mem_get_info": lambda device=None: (0, 0),
        "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda including_emulation=True: True,
        # torch.manual_seed calls torch.cuda.manual_seed_all: seeding the CPU's generator from
        # there, by the generator's own method, ends the circle.
        "manual_seed": lambda seed: torch.default_generator.manual_seed(int(seed)),
        "manual_seed_all": lambda seed: torch.default_generator.manual_seed(int(seed)),
        "seed": lambda: torch.default_generator.seed(),
        "initial_seed": lambda: torch.default_generator.initial_seed(),
        "get_rng_state": lambda device=None: torch.default_generator.get_state(),
        "set_rng_state": lambda state, device=None: torch.default_generator.set_state(state),
        "default_generators": (torch.default_generator,),
    }
    for name, stub in stubs.items():
        for module in (cuda, cuda.random, cuda.memory):
            if module is cuda or hasattr(module, name):
                setattr(module, name, stub)
    # A function mode holds for the thread that entered it; data loaders pin in others, too.
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    for name in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, name, lambda *args, **kwargs: None)


class _ZeroStats(dict[str, int]):
    """Memory statistics of a device that has no memory of its own."""

    def __missing__(self, key: str) -> int:
        return 0


def _stub_compile() -> None:
    def compile_nothing(model: Any = None, **kwargs: Any) -> Any:
        return model if model is not None else lambda function: function

    torch.compile = compile_nothing
    torch.optim.Optimizer._accelerator_graph_capture_health_check = lambda self: None  # type: ignore[method-assign]


def _stub_distributed() -> None:
    inner = dist.all_to_all_single

    @functools.wraps(inner)
    def all_to_all_single(*positional: Any, **keywords: Any) -> Any:
        # Megatron's MoE dispatcher turns split sizes into integers only where tensors are on a GPU.
        for name in ("output_split_sizes", "input_split_sizes"):
            if isinstance(keywords.get(name), torch.Tensor):
                keywords[name] = keywords[name].tolist()
        return inner(*positional, **keywords)

    dist.all_to_all_single = all_to_all_single
    share_gloo_device()


def _stub_backward() -> None:
    inner = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    @functools.wraps(inner)
    def run_backward(*positional: Any, **keywords: Any) -> Any:
        # backward() is called from within the mode's own handler, where the mode is off; recomputed layers need it.
        with _CudaMeansCpu():
            return inner(*positional, **keywords)

    torch.autograd._engine_run_backward = run_backward  # type: ignore[attr-defined]
