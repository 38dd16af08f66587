"""torch.distributed over gloo for code that was written for NCCL.

Gloo's all_gather wants tensors of one size, and it has no all_to_all of lists of tensors. `barrier` takes no devices.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def stand_in_for_nccl() -> None:
    """Replaces what differs, in this process for good."""
    dist.init_process_group = _with_gloo(dist.init_process_group)
    dist.barrier = _without_devices(dist.barrier)
    dist.all_gather = _of_any_sizes(dist.all_gather)
    dist.all_to_all = _all_to_all


def _with_gloo(init_process_group: Any) -> Any:
    return lambda *args, **kwargs: init_process_group(*args, **{**kwargs, "backend": "gloo"})


def _without_devices(barrier: Any) -> Any:
    return lambda group=None, async_op=False, device_ids=None: barrier(group=group)


def _of_any_sizes(all_gather: Any) -> Any:
    """All tensors are padded to the longest, gathered and trimmed."""

    def gather(outputs: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> None:
        del async_op
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
    del async_op
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
