"""Packs a trajectory into one tensor of bytes, a sample of the runtime's exchange, and unpacks it.

A parcel is the length of its header, the header as JSON (the nesting of the values, and dtype and shape of each
tensor), then every tensor's bytes. Trajectories of different rows, paddings and keys so fit one schema, and one
all-to-all moves them. The header is data: unpacking runs no code of another rank, as unpickling could.

A trajectory may hold tensors, numpy arrays, numbers, texts and bytes, nested in dicts, lists and tuples.

Invariants: the unpacked content equals the packed one, bit for bit, in memory of its own; each part starts at a
multiple of 16 bytes, as torch requires for a view of any dtype.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_balance.errors import BalanceError
from megatron_balance.samples.sample import Sample
from megatron_balance.samples.wire import ALIGNMENT_NBYTES

BYTES = "bytes"


def pack_parcel(content: object, *, device: torch.device | str = "cpu") -> Sample:
    """A trajectory as a sample with one "token" for each of its bytes.

    Args:
        content: the trajectory.
        device: where the parcel lives: where the process group wants its buffers.

    Raises:
        BalanceError: a value is of another type, or a tensor without plain strides (sparse).
    """
    tensors: list[Tensor] = []
    nesting = _encode(content, tensors=tensors)
    specs = [(str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for tensor in tensors]
    header = json.dumps([specs, nesting]).encode()
    parts = [_aligned(torch.tensor([len(header)]).view(torch.uint8), device=device)]
    parts.append(_aligned(torch.frombuffer(bytearray(header), dtype=torch.uint8), device=device))
    parts += [_aligned(tensor.contiguous().reshape(-1).view(torch.uint8), device=device) for tensor in tensors]
    return Sample({BYTES: torch.cat(parts)})


def unpack_parcel(parcel: Sample) -> Any:
    """The packed content; its tensors are copies, on the parcel's device."""
    data = parcel.per_token[BYTES]
    start = ALIGNMENT_NBYTES
    header_nbytes = int(data[:8].cpu().view(torch.int64))
    specs, nesting = json.loads(bytes(data[start : start + header_nbytes].cpu().numpy()))
    start = _next_part(start + header_nbytes)
    tensors: list[Tensor] = []
    for name, shape in specs:
        dtype: torch.dtype = getattr(torch, name)
        nbytes = math.prod(shape) * dtype.itemsize
        tensors.append(data[start : start + nbytes].clone().view(dtype).view(shape))
        start = _next_part(start + nbytes)
    return _decode(nesting, tensors=tensors)


def _encode(value: object, *, tensors: list[Tensor]) -> Any:
    """The value as JSON: itself where JSON has it, else `[kind, content]`; tensors are moved to the list."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise BalanceError(f"a trajectory holds a tensor of layout {value.layout}: only strided ones can travel.")
        tensors.append(value.detach())
        return ["tensor", len(tensors) - 1]
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        # An array that torch can neither share nor view is copied.
        tensors.append(torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("="))))
        return ["array" if isinstance(value, np.ndarray) else "scalar", len(tensors) - 1]
    if type(value) is bytes:
        tensors.append(torch.tensor(list(value), dtype=torch.uint8))
        return ["bytes", len(tensors) - 1]
    if type(value) in (list, tuple):
        items: Sequence[object] = value  # pyright: ignore[reportAssignmentType]
        return [type(value).__name__, [_encode(item, tensors=tensors) for item in items]]
    if isinstance(value, dict):
        pairs = [[_encode(key, tensors=tensors), _encode(item, tensors=tensors)] for key, item in value.items()]
        return ["dict", pairs]
    raise BalanceError(
        f"a trajectory holds a {type(value).__module__}.{type(value).__qualname__}, which cannot travel between ranks: "
        "give tensors, numbers, texts, and dicts, lists and tuples of them."
    )


def _decode(value: Any, *, tensors: Sequence[Tensor]) -> Any:
    if not isinstance(value, list):
        return value
    kind, content = value
    if kind == "dict":
        return {_decode(key, tensors=tensors): _decode(item, tensors=tensors) for key, item in content}
    if kind in ("list", "tuple"):
        items = [_decode(item, tensors=tensors) for item in content]
        return items if kind == "list" else tuple(items)
    tensor = tensors[content]
    if kind == "tensor":
        return tensor
    array = tensor.cpu().numpy()
    return array.tobytes() if kind == "bytes" else array[()] if kind == "scalar" else array


def _aligned(data: Tensor, *, device: torch.device | str) -> Tensor:
    """uint8 `[n]` filled up to the next multiple of the alignment."""
    return torch.nn.functional.pad(data.to(device), (0, _next_part(data.numel()) - data.numel()))


def _next_part(offset: int) -> int:
    return -(-offset // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
