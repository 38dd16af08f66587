"""Moves tensors to the toy device and back, and answers where they are: a mode over torch's functions in Python.

`.cuda()`, `.to()`, `.cpu()` and `device=` give a tensor its memory (toy_placement.py) and count what is copied;
`device`, `is_cuda`, `type()` and the like answer by it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from toy_placement import Memory, PlacementMode, is_on_device, memory_of, put
from toy_transfers import Kind

with torch._C.DisableTorchFunction():  # the shim's mode would say cpu
    CUDA = torch.device("cuda", 0)

_FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)


class DeviceMode(TorchFunctionMode):
    """Gives tensors their memory where code names a device.

    Args:
        placement: the mode of this thread that checks operators.
    """

    def __init__(self, placement: PlacementMode) -> None:
        super().__init__()
        self._placement = placement
        self._recorder = placement.recorder
        self._handlers: dict[Any, Callable[..., Any]] = {
            torch.device: _make_device,
            Tensor.device.__get__: _device_of,
            Tensor.is_cuda.__get__: self._is_cuda,
            Tensor.is_cpu.__get__: lambda tensor, *_: not self._is_cuda(tensor),
            Tensor.get_device: lambda tensor: 0 if _is_cuda(tensor) else -1,
            Tensor.is_pinned: lambda tensor, *_: memory_of(tensor) is Memory.PINNED,
            Tensor.type: _type,
            Tensor.cuda: lambda tensor, device=None, non_blocking=False, **_: self._move(
                tensor, Memory.DEVICE, non_blocking=non_blocking
            ),
            Tensor.cpu: lambda tensor, **_: self._move(tensor, Memory.PAGEABLE),
            Tensor.to: self._to,
            Tensor.tolist: self._tolist,
            Tensor.numpy: functools.partial(_only_of_host, Tensor.numpy),
            Tensor.__array__: functools.partial(_only_of_host, Tensor.__array__),
            Tensor.__deepcopy__: _deepcopy,
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        handler = self._handlers.get(func)
        if handler is not None:
            return handler(*args, **kwargs)
        memory: Memory | None = None
        if not getattr(func, "__module__", "").startswith("torch.distributed"):
            tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            memory = Memory.DEVICE if any(map(_is_cuda, tensors)) else Memory.PAGEABLE
        with self._placement.call(memory):
            return self._run(func, args, kwargs)

    def _run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device, pinned = kwargs.pop("device", None), kwargs.pop("pin_memory", False)
        if func is Tensor.new_tensor and device is None and is_on_device(args[0]):
            device = CUDA
        memory = Memory.PINNED if pinned else _memory_of_device(device)
        if memory is None and device is not None:  # meta
            kwargs["device"] = device
        result = func(*args, **kwargs)
        if memory is None:
            return result
        if func in _FROM_DATA and func is not Tensor.new_tensor and isinstance(args[0], Tensor):
            return self._move(result, memory)
        for tensor in filter(lambda leaf: isinstance(leaf, Tensor), tree_leaves(result)):
            if func in _FROM_DATA and memory is Memory.DEVICE:
                self._placement.count_copy_to_device(Memory.PAGEABLE, non_blocking=False)
            put(tensor, memory)
        return result

    def _is_cuda(self, tensor: Tensor, *_: Any) -> bool:
        # A stand-in for a kernel runs its code for a CPU.
        return _is_cuda(tensor) and not self._recorder.in_kernel

    def _to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        device, rest = kwargs.pop("device", None), list(args)
        if rest and isinstance(rest[0], Tensor):
            device, rest[0] = _device_of(rest[0]), rest[0].dtype
        elif rest and _names_device(rest[0]):
            device = rest.pop(0)
        memory = _memory_of_device(device)
        if memory is None and device is not None:  # meta
            return tensor.to(device, *rest, **kwargs)
        non_blocking = kwargs.get("non_blocking", next((value for value in rest if isinstance(value, bool)), False))
        cast = tensor.to(*rest, **kwargs) if rest or kwargs else tensor
        return cast if memory is None else self._move(cast, memory, non_blocking=non_blocking)

    def _move(self, tensor: Tensor, memory: Memory, *, non_blocking: bool = False) -> Tensor:
        of = memory_of(tensor)
        if (of is Memory.DEVICE) is (memory is Memory.DEVICE):
            return tensor
        if memory is Memory.DEVICE:
            self._placement.count_copy_to_device(of, non_blocking=non_blocking)
        elif non_blocking:
            memory = Memory.PINNED  # torch takes such memory by itself, and does not wait
        else:
            self._recorder.count(Kind.TO_HOST)
        moved = tensor.clone()
        put(moved, memory)
        return moved

    def _tolist(self, tensor: Tensor) -> Any:
        if is_on_device(tensor):
            self._recorder.count(Kind.READ)
        return tensor.tolist()


def _is_cuda(tensor: Tensor) -> bool:
    return not tensor.is_meta and is_on_device(tensor)


def _device_of(tensor: Tensor, *_: Any) -> torch.device:
    return CUDA if _is_cuda(tensor) else Tensor.device.__get__(tensor)


def _make_device(*args: Any, **kwargs: Any) -> torch.device:
    with torch._C.DisableTorchFunction():
        return torch.device(*args, **kwargs)


def _type(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    with torch._C.DisableTorchFunction():  # the shim's mode says cuda of every tensor
        result = tensor.type(*args, **kwargs)
    return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) and _is_cuda(tensor) else result


def _only_of_host(func: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    if is_on_device(tensor):
        raise TypeError("can't convert a tensor of the toy device to numpy: use Tensor.cpu() first")
    return func(tensor, *args, **kwargs)


def _deepcopy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    result = Tensor.__deepcopy__(tensor, memo)
    put(result, memory_of(tensor))  # the copy of a storage does not have its attributes
    return result


def _names_device(value: Any) -> bool:
    return isinstance(value, torch.device | str) or (isinstance(value, int) and not isinstance(value, bool))


def _memory_of_device(device: Any) -> Memory | None:
    """None where no device is named, and for meta."""
    if device is None:
        return None
    kind = "cuda" if isinstance(device, int) else str(device).split(":")[0]
    return {"cuda": Memory.DEVICE, "cpu": Memory.PAGEABLE}.get(kind)
