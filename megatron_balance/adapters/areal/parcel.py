"""A trajectory as one tensor of bytes, and back: whatever it holds, it travels as a sample of the runtime's exchange.

A parcel is the length of its header, the header (a pickle of the nesting, and of the dtype and shape of each tensor),
then every tensor's bytes. So trajectories of different rows, paddings and keys fit one schema, and one all-to-all
moves them. The header is unpickled, as AReaL does with all that its own ranks gather from one another.

Invariants: what comes back equals what went in, bit for bit, in memory of its own; each part starts at a multiple of
16 bytes, as torch wants it for a view of any dtype.
"""

from __future__ import annotations

import io
import math
import pickle
from typing import Any

import torch
from torch import Tensor

from megatron_balance.errors import BalanceError
from megatron_balance.runtime.sample import Sample
from megatron_balance.runtime.wire import ALIGNMENT_NBYTES

BYTES = "bytes"


class _Pickler(pickle.Pickler):
    """Puts tensors aside and their numbers in their place."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []

    def persistent_id(self, obj: object) -> int | None:
        if not isinstance(obj, Tensor):
            return None
        self.tensors.append(obj.detach())
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, *, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, pid: int) -> Tensor:
        return self.tensors[pid]


def pack_parcel(content: object, *, device: torch.device | str = "cpu") -> Sample:
    """Anything picklable with any tensors in it, as a sample of as many "tokens" as it has bytes.

    Args:
        content: the trajectory.
        device: where the parcel lives: where the process group wants its buffers.

    Raises:
        BalanceError: something in it cannot be pickled, or is a tensor without plain strides (sparse).
    """
    nesting = io.BytesIO()
    pickler = _Pickler(nesting)
    try:
        pickler.dump(content)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise BalanceError(f"a trajectory holds what cannot travel between ranks: {error}.") from error
    for tensor in pickler.tensors:
        if tensor.layout != torch.strided:
            raise BalanceError(f"a trajectory holds a tensor of layout {tensor.layout}: only strided ones can travel.")
    specs = [(tensor.dtype, tuple(tensor.shape)) for tensor in pickler.tensors]
    header = pickle.dumps((specs, nesting.getvalue()), protocol=pickle.HIGHEST_PROTOCOL)
    parts = [_aligned(torch.tensor([len(header)]).view(torch.uint8), device=device)]
    parts.append(_aligned(torch.frombuffer(bytearray(header), dtype=torch.uint8), device=device))
    parts += [_aligned(tensor.contiguous().reshape(-1).view(torch.uint8), device=device) for tensor in pickler.tensors]
    return Sample({BYTES: torch.cat(parts)})


def unpack_parcel(parcel: Sample) -> Any:
    """What was packed; its tensors are copies, on the parcel's device."""
    data = parcel.per_token[BYTES]
    start = ALIGNMENT_NBYTES
    header_nbytes = int(data[:8].cpu().view(torch.int64))
    # From a rank of this run, through its process group: no file and nobody else can put bytes here.
    specs, nesting = pickle.loads(bytes(data[start : start + header_nbytes].cpu().numpy()))  # noqa: S301
    start = _next_part(start + header_nbytes)
    tensors: list[Tensor] = []
    for dtype, shape in specs:
        nbytes = math.prod(shape) * dtype.itemsize
        tensors.append(data[start : start + nbytes].clone().view(dtype).view(shape))
        start = _next_part(start + nbytes)
    return _Unpickler(io.BytesIO(nesting), tensors=tensors).load()


def _aligned(data: Tensor, *, device: torch.device | str) -> Tensor:
    """uint8 `[n]` filled up to the next multiple of the alignment."""
    return torch.nn.functional.pad(data.to(device), (0, _next_part(data.numel()) - data.numel()))


def _next_part(offset: int) -> int:
    return -(-offset // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
