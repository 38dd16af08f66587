"""Small gathers, broadcasts and maxima over a process group; their errors name the peers that did not answer.

Invariants: tensors only, no pickled objects; a rank's row is as long as every other's.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_balance.runtime.buffer_exchange import exchange_with_peers
from megatron_balance.runtime.peers import named_ranks, waiting_for

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
