"""Exchanges parts of buffers between ranks, which know beforehand how much goes from which rank to which.

Between CPUs a rank sends to the ranks that share samples with it alone, one message each. All ranks of a group in one
collective, also those that send one another nothing, would connect every rank to every other in the first step
(docs/scale.md). Between GPUs it is that collective: the first call over NCCL must be one of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def exchange_with_peers(
    receive: Tensor,
    send: Tensor,
    *,
    receive_sizes: Mapping[int, int],
    send_sizes: Mapping[int, int],
    group: dist.ProcessGroup,
) -> None:
    """One message to and from each rank named, none where it is empty; other ranks take no part.

    All receives are posted before the first send, and none is waited for before the last send: gloo moves messages in
    any order, so no order of ranks can deadlock. Between two ranks they arrive in the order in which they were sent.

    Args:
        receive: `[sum of receive_sizes]`, the parts that arrive, in the order of `receive_sizes`.
        send: `[sum of send_sizes]`, those that leave; of the same dtype.
        receive_sizes: rank in the group → entries from it. It must send as many, or this rank waits until the timeout.
        send_sizes: rank in the group → entries for it.
        group: of these ranks; gloo.
    """
    arriving, leaving = _parts(receive, receive_sizes), _parts(send, send_sizes)
    works = [dist.irecv(part, group=group, group_src=rank) for rank, part in arriving.items()]
    works += [dist.isend(part, group=group, group_dst=rank) for rank, part in leaving.items()]
    timeout = _timeout_of(group)
    for work in works:
        assert work is not None, "this rank is a member"
        work.wait(timeout)


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Of its collectives now; 0 for the backend's own.

    Megatron shortens it once training runs (`--distributed-timeout-seconds-after-init`). Messages between two ranks
    would keep the one that the group was made with.
    """
    backend: Any = group._get_backend(torch.device("cpu"))
    backend = getattr(backend, "wrapped_pg", backend)  # under TORCH_DISTRIBUTED_DEBUG=DETAIL
    return getattr(getattr(backend, "options", None), "_timeout", timedelta(0))


def _parts(buffer: Tensor, sizes: Mapping[int, int]) -> dict[int, Tensor]:
    parts = zip(sizes, buffer.split([*sizes.values()]), strict=True)
    return {rank: part for rank, part in parts if part.numel()}


def exchange_with_all(
    receive: Tensor,
    send: Tensor,
    *,
    receive_sizes: Mapping[int, int],
    send_sizes: Mapping[int, int],
    group: dist.ProcessGroup,
) -> None:
    """One collective of all ranks of the group; arguments as for `exchange_with_peers`."""
    received, sent = ([of.get(rank, 0) for rank in range(group.size())] for of in (receive_sizes, send_sizes))
    dist.all_to_all_single(receive, send, received, sent, group=group)
