"""A pytest plugin: the tests of recsys-examples on CPU and gloo, with the adapter on. `pytest -p recsys_plugin`.

RECSYS_EXAMPLES names the `examples` folder of a checkout; one process a rank, named by RANK and WORLD_SIZE as torchrun
does. On a machine without a GPU:

dynamicemb          its CUDA extension, imported by the data sets: a package that has whatever name is asked of it
fbgemm              has no CPU kernel for `keyed_jagged_index_select_dim1`: one in plain torch is registered
torch.cuda, "cuda"  devices and streams: the CPU, and nothing
test_utils          imports the CUDA layers; the balancer's test needs one function, read from the checkout's file
NCCL                gloo's all_gather wants tensors of one size; it has no all_to_all of lists, and no devices
"""

from __future__ import annotations

import ast
import contextlib
import os
import sys
import types
from pathlib import Path
from typing import Any

import cpu_shim
import fbgemm_gpu  # noqa: F401  # registers the operators
import pytest
import torch
import torch.distributed as dist
from any_module import stand_in_for
from torch.cuda import nvtx
from torch.overrides import TorchFunctionMode

from megatron_balance.adapters import recsys


def pytest_configure(config: pytest.Config) -> None:
    cpu_shim.share_gloo_device()  # upstream's tests make hundreds of groups
    stand_in(Path(os.environ["RECSYS_EXAMPLES"]))
    recsys.install()


class CudaIsCpu(TorchFunctionMode):
    """Every call that names a CUDA device gets the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if "device" in kwargs:
            kwargs["device"] = _cpu_for_cuda(kwargs["device"])
        if func is torch.Tensor.to:
            args = tuple(_cpu_for_cuda(argument) for argument in args)
        return func(*args, **kwargs)


def stand_in(examples: Path) -> None:
    """Makes the modules of a checkout importable and its tests run, in this process for good."""
    sys.path[:0] = [str(examples), str(examples / "hstu"), str(examples / "tests/commons")]
    stand_in_for("dynamicemb")
    library = torch.library.Library("fbgemm", "IMPL")
    library.impl("keyed_jagged_index_select_dim1", _keyed_jagged_index_select_dim1, "CPU")
    # The registration lasts as long as the library object does.
    torch.cuda._fbgemm_on_cpu = library  # type: ignore[attr-defined]
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]
    # A function for each: torch.compile's tables tell torch's functions apart by identity.
    for owner, name in (
        (torch.cuda, "set_device"),
        (torch.cuda, "synchronize"),
        (nvtx, "range_push"),
        (nvtx, "range_pop"),
    ):
        setattr(owner, name, lambda *args, **kwargs: None)
    CudaIsCpu().__enter__()
    stand_in_for_nccl()
    sys.modules["test_utils"] = _test_utils(examples / "hstu/test_utils.py")


def _keyed_jagged_index_select_dim1(
    values: torch.Tensor,
    lengths: torch.Tensor,
    offsets: torch.Tensor,
    indices: torch.Tensor,
    batch_size: int,
    weights: torch.Tensor | None = None,
    selected_lengths_sum: int | None = None,
) -> list[torch.Tensor]:
    """Rows `indices` of every key, key after key; as fbgemm documents it."""
    num_keys = lengths.numel() // batch_size
    segments = (torch.arange(num_keys)[:, None] * batch_size + indices[None]).reshape(-1)
    chosen = lengths[segments]
    shifts = offsets[segments].long() - (chosen.long().cumsum(0) - chosen.long())
    entries = torch.repeat_interleave(shifts, chosen.long()) + torch.arange(int(chosen.sum()))
    selected = [values[entries], chosen]
    return selected if weights is None else [*selected, weights[entries]]


def _cpu_for_cuda(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("cuda"):
        return "cpu"
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return value


def _test_utils(source: Path) -> types.ModuleType:
    """`generate_random_batches` of the checkout's hstu/test_utils.py, without what that file imports."""
    import commons.datasets
    from commons.datasets.hstu_batch import HSTUBatch

    functions = [node for node in ast.parse(source.read_text()).body if isinstance(node, ast.FunctionDef)]
    nodes = [node for node in functions if node.name == "generate_random_batches"]
    module = types.ModuleType("test_utils")
    tracker = types.SimpleNamespace(fork=lambda *args: contextlib.nullcontext())
    tensor_parallel = types.SimpleNamespace(get_cuda_rng_tracker=lambda: tracker)
    exec("from typing import *", vars(module))
    vars(module).update(torch=torch, HSTUBatch=HSTUBatch, datasets=commons.datasets, tensor_parallel=tensor_parallel)
    exec(compile(ast.Module(nodes, type_ignores=[]), str(source), "exec"), vars(module))
    return module


def stand_in_for_nccl() -> None:
    """Replaces what differs, in this process for good."""
    init_process_group, barrier = dist.init_process_group, dist.barrier
    dist.init_process_group = lambda *args, **kwargs: init_process_group(*args, **{**kwargs, "backend": "gloo"})
    dist.barrier = lambda group=None, async_op=False, device_ids=None: barrier(group=group)
    dist.all_gather = _any_sizes(dist.all_gather)
    dist.all_to_all = _all_to_all


def _any_sizes(all_gather: Any) -> Any:
    """All tensors are padded to the longest, gathered and trimmed."""

    def gather(outputs: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> None:
        length = max(output.shape[0] for output in outputs)
        padded = tensor.new_zeros((length, *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor
        gathered = [torch.empty_like(padded) for _ in outputs]
        all_gather(gathered, padded, group=group)
        for output, whole in zip(outputs, gathered, strict=True):
            output.copy_(whole[: output.shape[0]])

    return gather


def _all_to_all(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: Any = None, async_op: bool = False
) -> None:
    """By pairs of sends and receives; what is empty is not sent."""
    me = dist.get_rank(group)
    outputs[me].copy_(inputs[me])
    pairs: list[dist.P2POp] = []
    for peer in range(len(outputs)):
        if peer == me:
            continue
        rank = peer if group is None else dist.get_global_rank(group, peer)
        if inputs[peer].numel():
            pairs.append(dist.P2POp(dist.isend, inputs[peer].contiguous(), rank, group))
        if outputs[peer].numel():
            pairs.append(dist.P2POp(dist.irecv, outputs[peer], rank, group))
    for work in dist.batch_isend_irecv(pairs) if pairs else []:
        work.wait()
