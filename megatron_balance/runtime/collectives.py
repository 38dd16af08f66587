"""Small gathers, broadcasts, maxima and exchanges over a process group; errors name the peers that did not answer.

In an exchange between CPUs a rank sends to the ranks that share samples with it alone, one message each. All ranks of a
group in one collective, also those that send one another nothing, would connect every rank to every other in the first
step (docs/scale.md). Between GPUs it is that collective: the first call over NCCL must be one of all ranks.

Invariants: tensors only, no pickled objects; a rank's row is as long as every other's; in an exchange ranks know
beforehand how much goes from which rank to which.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megatron_balance.runtime.peers import named_ranks, waiting_for


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


Scalar = TypeVar("Scalar", np.int64, np.float64)


def ranks_where(mask: NDArray[np.bool_], *, group: dist.ProcessGroup) -> str:
    """`rank 3` or `ranks 1, 2 and 7 more`, as they are numbered in the world.

    Args:
        mask: `[group_size]`.
        group: the ranks.
    """
    world_ranks = dist.get_process_group_ranks(group)
    return named_ranks([world_ranks[rank] for rank in np.flatnonzero(mask)])


def all_gather_row(
    row: NDArray[np.int64], *, group: dist.ProcessGroup, what: str, device: torch.device | str = "cpu"
) -> NDArray[np.int64]:
    """int64 `[n]` of every rank → `[group_size, n]`.

    Args:
        row: of this rank.
        group: all that take part.
        what: the data waited for, named in the error where a peer does not answer.
        device: where the buffers live.
    """
    return _all_gather_tensor(torch.from_numpy(row), group=group, what=what, device=device).numpy()


def gather_row(row: NDArray[Scalar], *, group: dist.ProcessGroup, what: str) -> NDArray[Scalar] | None:
    """`[n]` of every rank → `[group_size, n]` on the first rank of the group, None elsewhere; over gloo.

    Args:
        row: of this rank.
        group: all that take part.
        what: as for `all_gather_row`.
    """
    share = torch.from_numpy(row)
    shares = [torch.empty_like(share) for _ in range(group.size())] if group.rank() == 0 else None
    with waiting_for(what, group=group):
        dist.gather(share, shares, dst=dist.get_global_rank(group, 0), group=group)
    return None if shares is None else torch.stack(shares).numpy()


def broadcast_row(row: NDArray[Scalar], *, group: dist.ProcessGroup, what: str) -> NDArray[Scalar]:
    """`[n]` of the group's first rank on every rank; over gloo.

    Args:
        row: of this rank; on the others its values are not read.
        group: all that take part.
        what: as for `all_gather_row`.
    """
    message = torch.from_numpy(row.copy())
    with waiting_for(what, group=group):
        dist.broadcast(message, dist.get_global_rank(group, 0), group=group)
    return message.numpy()


def largest_row(row: NDArray[np.int64], *, group: dist.ProcessGroup, what: str) -> NDArray[np.int64]:
    """The largest of each number over all ranks, int64 `[n]`; over gloo.

    In round k a rank hands what it knows to the rank 2**k above and takes in what the one 2**k below knows: after
    ceil(log2(group size)) rounds each knows of all (the dissemination barrier: Hensgen, Finkel and Manber 1988). gloo's
    all_reduce and all_gather are rings, of as many rounds as there are other ranks.

    Args:
        row: of this rank, `[n]`.
        group: all that take part.
        what: as for `all_gather_row`.
    """
    largest, rank, size = torch.from_numpy(row.copy()), group.rank(), group.size()
    with waiting_for(what, group=group):
        for distance in (1 << bit for bit in range((size - 1).bit_length())):
            received = torch.empty_like(largest)
            below, above = (rank - distance) % size, (rank + distance) % size
            exchange_with_peers(
                received, largest, receive_sizes={below: len(row)}, send_sizes={above: len(row)}, group=group
            )
            largest = torch.maximum(largest, received)
    return largest.numpy()


def all_gather_bytes(
    data: bytes,
    *,
    nbytes: NDArray[np.int64],
    group: dist.ProcessGroup,
    what: str,
    device: torch.device | str = "cpu",
) -> list[bytes]:
    """The bytes of every rank, of which every rank already knows the number: `nbytes` int64 `[group_size]`."""
    row = torch.zeros(int(nbytes.max()), dtype=torch.uint8)
    row[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    rows = _all_gather_tensor(row, group=group, what=what, device=device)
    return [bytes(rows[rank, :count].tolist()) for rank, count in enumerate(nbytes)]


def _all_gather_tensor(
    row: torch.Tensor, *, group: dist.ProcessGroup, what: str, device: torch.device | str
) -> torch.Tensor:
    """`[n]` of every rank → `[group_size, n]`, on the CPU."""
    gathered = torch.empty(group.size() * row.numel(), dtype=row.dtype, device=device)
    row = row.to(device)
    with waiting_for(what, group=group):
        dist.all_gather_into_tensor(gathered, row, group=group)
        return gathered.view(group.size(), -1).cpu()
