"""The rules of the toy device: which memory a tensor lies in, and which operators may take it.

Each storage carries its memory as an attribute, so views, `Tensor.data`, flat buffers and gradients follow by
themselves. A dispatch mode sees every operator below autograd, in backward passes too. As on CUDA:

- an operator takes tensors of the host or of the device, not of both; its results lie where its arguments do;
- 0-dim tensors of the host are scalars to pointwise operators on the device;
- copy_ takes both, and so does indexing a tensor of the device by indices of the host, which are copied first;
- collectives take tensors of the device over groups of the default backend, of the host over groups that ask for gloo.

Not modelled: streams (the order of work, and reading pinned memory before a copy into it has ended), CUDA graphs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from toy_transfers import Kind, Recorder

_ATTRIBUTE = "toy_memory"
aten = torch.ops.aten


class Memory(Enum):
    """Memory that holds a storage."""

    PAGEABLE = "pageable host memory"
    PINNED = "pinned host memory"
    DEVICE = "device memory"


class PlacementError(RuntimeError):
    """CUDA would refuse it: tensors of two memories in one operator, or of the wrong one in a collective."""


def memory_of(tensor: Tensor) -> Memory:
    """Memory that holds a tensor; pageable unless it was moved or made elsewhere."""
    return getattr(tensor.untyped_storage(), _ATTRIBUTE, Memory.PAGEABLE)


def put(tensor: Tensor, memory: Memory) -> None:
    """Say that a tensor, and all that shares its storage, lies there."""
    setattr(tensor.untyped_storage(), _ATTRIBUTE, memory)


def is_on_device(tensor: Tensor) -> bool:
    """True if a tensor lies in device memory."""
    return memory_of(tensor) is Memory.DEVICE


_READS = {aten._local_scalar_dense.default, aten.equal.default}
_SHAPES = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.bincount.default,
}
_INDEXING = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
}


class PlacementMode(TorchDispatchMode):
    """Checks every operator of one thread, and counts those that make the host wait.

    Args:
        recorder: counts.
        host_groups: names of the process groups that take tensors of the host.
    """

    def __init__(self, recorder: Recorder, *, host_groups: set[str]) -> None:
        super().__init__()
        self.recorder = recorder
        self._host_groups = host_groups
        self._call: Memory | None = None

    @contextlib.contextmanager
    def call(self, memory: Memory | None) -> Iterator[None]:
        """Operators are those of one call in Python, whose tensors lie there; None for what C++ does by itself.

        That is the autograd engine, and collectives over gloo, which stage tensors of the device in host memory where
        NCCL would not.
        """
        outer, self._call = self._call, memory
        try:
            yield
        finally:
            self._call = outer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():  # function modes are still there where the autograd engine calls
            return self._dispatch(func, args, kwargs or {})

    def count_copy_to_device(self, memory: Memory, *, non_blocking: bool) -> None:
        """A copy from host memory to the device. The host waits for what is not asked to be non-blocking."""
        kind = Kind.PINNED if memory is Memory.PINNED else Kind.PAGEABLE
        self.recorder.count(kind, *(() if non_blocking else (Kind.BLOCKING,)))

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if func.namespace == "c10d":
            self._check_collective(func, tensors, leaves)
            return func(*args, **kwargs)
        if not tensors:
            # Tensors made from none lie where the call's do. The engine makes zeros for gradients that are undefined.
            in_backward = torch._C._current_graph_task_id() != -1
            result = func(*args, **kwargs)
            if self._call is Memory.DEVICE or (self._call is None and in_backward):
                _put_new(result)
            return result
        if not any(map(is_on_device, tensors)):
            return func(*args, **kwargs)
        if func is aten.copy_.default:
            self._count_copy(*args, **kwargs)
        elif func in _INDEXING:
            self._check_indexing(func, *args)
        else:
            _check_one_memory(func, tensors)
        if func in _READS:
            self.recorder.count(Kind.READ)
        elif func in _SHAPES or (func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None):
            self.recorder.count(Kind.SHAPE)
        result = func(*args, **kwargs)
        _put_new(result, given=tensors)
        return result

    def _count_copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> None:
        to, of = memory_of(target), memory_of(source)
        if self._call is None or (to is Memory.DEVICE) is (of is Memory.DEVICE):
            return
        if to is Memory.DEVICE:
            self.count_copy_to_device(of, non_blocking=non_blocking)
        elif not (to is Memory.PINNED and non_blocking):
            self.recorder.count(Kind.TO_HOST)

    def _check_indexing(self, func: Any, indexed: Tensor, indices: Sequence[Tensor | None], *rest: Any) -> None:
        values = [value for value in rest if isinstance(value, Tensor)]
        _check_one_memory(func, [indexed, *(value for value in values if value.dim() or is_on_device(value))])
        for index in filter(lambda index: index is not None, indices):
            if not is_on_device(indexed):  # then an index, or the call would not be here, lies on the device
                raise _refused(func, [indexed, index])
            if not is_on_device(index):
                self.count_copy_to_device(memory_of(index), non_blocking=False)
            is_mask = index.dtype in (torch.bool, torch.uint8)
            if is_mask and not (values and values[0].numel() == 1):  # one value for a mask is a masked_fill
                self.recorder.count(Kind.SHAPE)

    def _check_collective(self, func: Any, tensors: Sequence[Tensor], leaves: Sequence[Any]) -> None:
        groups = [_process_group(leaf) for leaf in leaves if isinstance(leaf, torch.ScriptObject)]
        takes_host = any(group.group_name in self._host_groups for group in groups if group is not None)
        if func is torch.ops.c10d.barrier.default:
            if not takes_host:
                self.recorder.count(Kind.WAIT)
        elif any(is_on_device(tensor) is takes_host for tensor in tensors):
            takes = "the host" if takes_host else "the device"
            raise PlacementError(f"{func}: a group that takes tensors of {takes} got {_described(tensors)}")


def _put_new(result: Any, *, given: Sequence[Tensor] = ()) -> None:
    """Put on the device what an operator made; what shares the storage of an argument lies where that does."""
    for made in tree_leaves(result):
        if isinstance(made, Tensor) and not made.is_meta and not hasattr(made.untyped_storage(), _ATTRIBUTE):
            storage = made.untyped_storage()
            if not any(storage is argument.untyped_storage() for argument in given):
                put(made, Memory.DEVICE)


def _check_one_memory(func: Any, tensors: Sequence[Tensor]) -> None:
    """Raise where tensors of host and device meet, unless those of the host are scalars that are only read."""
    on_host = [tensor for tensor in tensors if not is_on_device(tensor)]
    if not on_host or len(on_host) == len(tensors):
        return
    foreach = func.__name__.startswith("_foreach_")
    takes_scalars = foreach or torch.Tag.pointwise in func.tags
    first = func._schema.arguments[0].alias_info
    writes_host = not foreach and first is not None and first.is_write and tensors[0] is on_host[0]
    if not takes_scalars or writes_host or any(tensor.dim() for tensor in on_host):
        raise _refused(func, tensors)


def _refused(func: Any, tensors: Sequence[Tensor]) -> PlacementError:
    return PlacementError(f"{func} of tensors on host and device: {_described(tensors)}")


def _described(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{tuple(tensor.shape)} in {memory_of(tensor).value}" for tensor in tensors)


def _process_group(script_object: Any) -> dist.ProcessGroup | None:
    try:
        return dist.ProcessGroup.unbox(script_object)
    except (RuntimeError, TypeError):  # a reduce operation
        return None
